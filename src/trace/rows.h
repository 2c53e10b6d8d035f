// SPDX-License-Identifier: Apache-2.0
// Random numbers by index and rows of vectors: what the families of synthetic inputs are made of.
#pragma once

#include <cmath>
#include <cstdint>
#include <numbers>
#include <span>

#include "base/hash.h"

namespace sagebwd::trace {

/// What a stream of random numbers is for: part of its key.
enum Stream : uint64_t {
  kQ,
  kK,
  kV,
  kDout,
  kSinkDirection,
  kChannels,
  kFactors,
  kOffset,
  kPeakRow,
  kPeakKey,
  kTailKey,
  kTailValue,
};

/// Independent normal numbers by index: Box-Muller on two 32-bit uniforms of one hash.
class Normal {
 public:
  Normal(uint64_t seed, Stream stream, int64_t batch, int64_t head)
      : key_(hash64({seed, stream, static_cast<uint64_t>(batch), static_cast<uint64_t>(head)})) {}

  double operator()(int64_t index) const {
    const uint64_t bits = mix64(key_ ^ static_cast<uint64_t>(index >> 1));
    const double u = (static_cast<double>(bits >> 32) + 0.5) * 0x1p-32;  // in (0, 1)
    const double angle = static_cast<double>(bits & 0xffffffffu) * 0x1p-32 * 2 * std::numbers::pi;
    const double radius = std::sqrt(-2 * std::log(u));
    return radius * ((index & 1) ? std::sin(angle) : std::cos(angle));
  }

 private:
  uint64_t key_;
};

inline void fill(std::span<float> out, const Normal& normal, double sigma) {
  for (size_t i = 0; i < out.size(); ++i)
    out[i] = static_cast<float>(sigma * normal(static_cast<int64_t>(i)));
}

/// One head of one tensor: rows of d values.
struct Rows {
  std::span<float> data;
  int64_t d;
  std::span<float> operator[](int64_t i) const { return data.subspan(i * d, d); }
  int64_t count() const { return static_cast<int64_t>(data.size()) / d; }
};

inline double dot(std::span<const float> a, std::span<const float> b) {
  double sum = 0;
  for (size_t c = 0; c < a.size(); ++c) sum += static_cast<double>(a[c]) * b[c];
  return sum;
}

inline void add_scaled(std::span<float> x, double factor, std::span<const float> y) {
  for (size_t c = 0; c < x.size(); ++c) x[c] = static_cast<float>(x[c] + factor * y[c]);
}

}  // namespace sagebwd::trace
