// SPDX-License-Identifier: Apache-2.0
// Random problems, each a pure function of its number.
#pragma once

#include <cstdint>
#include <cstdlib>
#include <random>

#include "base/hash.h"

namespace sagebwd::gpu {

inline int64_t from_environment(const char* name, int64_t otherwise) {
  const char* text = std::getenv(name);
  return text != nullptr && *text != '\0' ? std::strtoll(text, nullptr, 10) : otherwise;
}

class Random {
 public:
  explicit Random(int64_t number) : engine_(hash64({0x6f0, static_cast<uint64_t>(number)})) {}
  int64_t integer(int64_t low, int64_t high) {
    return std::uniform_int_distribution<int64_t>(low, high)(engine_);
  }
  bool chance(double p) { return std::uniform_real_distribution<double>()(engine_) < p; }

 private:
  std::mt19937_64 engine_;
};

}  // namespace sagebwd::gpu
