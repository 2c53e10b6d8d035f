// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>

namespace sagebwd::cuda::tuned {

/// Divides numbers below 2^31 by one that the host knows, without a division.
struct Divisor {
  uint32_t factor = 0;
  int shift = 0;
  Divisor() = default;
  explicit Divisor(int64_t by) {
    while ((int64_t{1} << shift) < by) ++shift;
    if (by > 0) factor = static_cast<uint32_t>(((uint64_t{1} << (31 + shift)) + by - 1) / by);
    shift += 31;
  }
  template <typename Int>
  constexpr Int divide(Int x) const {
    return static_cast<Int>((static_cast<uint64_t>(x) * factor) >> shift);
  }
};

}  // namespace sagebwd::cuda::tuned
