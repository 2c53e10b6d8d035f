// SPDX-License-Identifier: Apache-2.0
// The rotation of numerics/rotate.h over lanes that hold eight neighbouring channels each.
#pragma once

#include <cstdint>

#include "numerics/rotate.h"

namespace sagebwd::cuda::tile {

/// Signs of the eight channels from `channel` on, a multiple of eight.
__device__ __forceinline__ void flip_signs(float (&x)[8], uint32_t channel) {
  const uint32_t signs = numerics::rotation_signs(static_cast<int>(channel / 32)) >> channel % 32;
#pragma unroll
  for (int e = 0; e < 8; ++e)
    x[e] = __uint_as_float(__float_as_uint(x[e]) ^ ((signs >> e & 1u) << 31));
}

/// A step of the Hadamard transform.
__device__ __forceinline__ void hadamard_pair(float& a, float& b) {
  const float sum = a + b, difference = a - b;
  a = sum, b = difference;
}

/// Its steps between channels of the same lane.
__device__ __forceinline__ void hadamard_inside(float (&x)[8]) {
#pragma unroll
  for (int h = 1; h < 8; h *= 2)
#pragma unroll
    for (int e = 0; e < 8; ++e)
      if ((e & h) == 0) hadamard_pair(x[e], x[e + h]);
}

/// The step between lanes `distance` apart, whose channels are 8·distance apart. `upper`: this lane
/// has the later channels.
__device__ __forceinline__ void hadamard_across(float (&x)[8], int distance, bool upper) {
#pragma unroll
  for (int e = 0; e < 8; ++e) {
    const float other = __shfl_xor_sync(0xffffffffu, x[e], distance);
    x[e] = upper ? other - x[e] : x[e] + other;
  }
}

}  // namespace sagebwd::cuda::tile
