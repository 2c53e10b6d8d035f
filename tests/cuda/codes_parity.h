// SPDX-License-Identifier: Apache-2.0
// Saved codes against those of the recipe oracle.
#pragma once

#include <gtest/gtest.h>

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <vector>

#include "sagebwd/codes.h"

namespace sagebwd::gpu {

inline bool same_bits(const std::vector<float>& a, const std::vector<float>& b) {
  return std::equal(a.begin(), a.end(), b.begin(), b.end(), [](float x, float y) {
    return std::bit_cast<uint32_t>(x) == std::bit_cast<uint32_t>(y) ||
           (std::isnan(x) && std::isnan(y));
  });
}

/// A part of saved codes: INT8 where `codes`, else FP32.
struct CodesPart {
  const char* name;
  int64_t at, end;
  bool codes;
};

/// All parts, in their order.
inline std::vector<CodesPart> codes_parts(const CodesLayout& at) {
  std::vector<CodesPart> parts = {
      {"q8", at.q8, 0, true}, {"k8", at.k8, 0, true}, {"v8", at.v8, 0, true}};
  const auto add = [&](const char* name, int64_t from, bool codes = false) {
    parts.push_back({name, from, 0, codes});
  };
  add("q_scale", at.q_scale), add("v_scale", at.v_scale), add("k_scale", at.k_scale);
  add("centre8", at.centre8, true), add("centre_scale", at.centre_scale);
  add("v_centre8", at.v_centre8, true), add("v_centre_scale", at.v_centre_scale);
  for (size_t i = 0; i < parts.size(); ++i)
    parts[i].end = i + 1 < parts.size() ? parts[i + 1].at : at.bytes;
  return parts;
}

inline std::vector<float> floats_of(const std::vector<std::byte>& codes, const CodesPart& part) {
  std::vector<float> x(static_cast<size_t>(part.end - part.at) / 4);
  std::memcpy(x.data(), codes.data() + part.at, x.size() * 4);
  return x;
}

/// How close codes are to the oracle's. rounded: means and rotations have rounding of their own, as
/// those of cuda-sm90. Then one code in ten thousand may be a neighbour; most cases have none. Both
/// sides were filled with the same byte beforehand, for what is not written.
enum class CodesAre { same, rounded };

inline void expect_codes(const std::vector<std::byte>& got, const std::vector<std::byte>& want,
                         const CodesLayout& at, CodesAre are) {
  ASSERT_EQ(static_cast<int64_t>(got.size()), at.bytes);
  for (const CodesPart& part : codes_parts(at)) {
    SCOPED_TRACE(part.name);
    if (part.codes) {
      size_t others = 0;
      const size_t begin = static_cast<size_t>(part.at), end = static_cast<size_t>(part.end);
      for (size_t j = begin; j < end; ++j) {
        const int a = static_cast<int8_t>(got[j]), b = static_cast<int8_t>(want[j]);
        others += a != b;
        ASSERT_LE(std::abs(a - b), are == CodesAre::same ? 0 : 1) << j - begin;
      }
      EXPECT_LE(others, (end - begin) / 10000 + 1);
      if (others > 0) std::printf("%s: %zu of %zu codes differ\n", part.name, others, end - begin);
      continue;
    }
    const std::vector<float> a = floats_of(got, part), b = floats_of(want, part);
    if (are == CodesAre::same) {
      EXPECT_TRUE(same_bits(a, b));
      continue;
    }
    float top = 0.0f;
    for (float x : b)
      if (std::isfinite(x)) top = std::max(top, std::fabs(x));
    for (size_t j = 0; j < a.size(); ++j) {
      if (!std::isfinite(a[j]) && !std::isfinite(b[j])) continue;
      ASSERT_LE(std::fabs(a[j] - b[j]), 1e-6f * top) << j;
    }
  }
}

}  // namespace sagebwd::gpu
