// SPDX-License-Identifier: Apache-2.0
// The rotation of a single row, by a thread per channel. Operations are those of numerics/rotate.h
// in the same order, so results have the same bits.
#pragma once

#include "numerics/rotate.h"

namespace sagebwd::cuda::tuned {

/// x·H/√size of a row in shared memory, in blocks of `size` channels; `x` is the one of this
/// thread's channel. All threads come here, those with real = false for the barriers alone.
__device__ inline float hadamard_row(float* row, float x, int channel, int size, bool real) {
#pragma unroll 1
  for (int h = 1; h < size; h *= 2) {
    if (real) row[channel] = x;
    __syncthreads();
    if (real) {
      const float other = row[channel ^ h];
      x = (channel & h) != 0 ? other - x : x + other;
    }
    __syncthreads();
  }
  return __fmul_rn(x, numerics::rotation_unit(size));
}

__device__ inline float flipped(float x, int channel) {
  return numerics::rotation_flips(channel) ? -x : x;
}

}  // namespace sagebwd::cuda::tuned
