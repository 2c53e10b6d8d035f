// SPDX-License-Identifier: Apache-2.0
// A small replayable random sequence for tests.
#pragma once

#include <cstdint>
#include <vector>

#include "base/hash.h"

namespace sagebwd::testing {

class Random {
 public:
  explicit Random(uint64_t seed) : seed_(seed) {}

  uint64_t bits() { return hash64({seed_, count_++}); }
  /// Uniform in [0, 1).
  float unit() { return unit_float(bits()); }
  /// Uniform in [low, high).
  float between(float low, float high) { return low + (high - low) * unit(); }
  /// Uniform in low … high, both included.
  int64_t integer(int64_t low, int64_t high) {
    return low + static_cast<int64_t>(bits() % static_cast<uint64_t>(high - low + 1));
  }
  bool chance(double probability) { return static_cast<double>(unit()) < probability; }
  template <typename T>
  T pick(const std::vector<T>& choices) {
    return choices[static_cast<size_t>(integer(0, static_cast<int64_t>(choices.size()) - 1))];
  }

 private:
  uint64_t seed_, count_ = 0;
};

}  // namespace sagebwd::testing
