// SPDX-License-Identifier: Apache-2.0
// Codes of floats that have their order as unsigned numbers: the maximum of floats by atomicMax.
#pragma once

#include <cmath>
#include <cstdint>

namespace sagebwd::cuda::tile {

/// NaN is above everything.
__device__ __forceinline__ uint32_t ordered(float x) {
  if (x != x) return 0xffffffffu;
  const uint32_t u = __float_as_uint(x);
  return u & 0x80000000u ? ~u : u | 0x80000000u;
}

/// 0, which no float has, is -inf.
__device__ __forceinline__ float from_ordered(uint32_t u) {
  return u == 0 ? -INFINITY : __uint_as_float(u & 0x80000000u ? u ^ 0x80000000u : ~u);
}

}  // namespace sagebwd::cuda::tile
