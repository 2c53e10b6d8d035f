// SPDX-License-Identifier: Apache-2.0
// The rotation of numerics/rotate.h by a warp, for one token in shared memory. It makes the same
// additions, so the results have the same bits. Before and after, a lane may touch the channels
// lane, lane + 32, … only.
#pragma once

#include "numerics/rotate.h"

namespace sagebwd::cuda::plain {

namespace detail {

__device__ inline void flip_signs(float* x, int d) {
  for (int c = static_cast<int>(threadIdx.x) % 32; c < d; c += 32)
    if (numerics::rotation_flips(c)) x[c] = -x[c];
}

__device__ inline void hadamard(float* x, int d) {
  const int lane = static_cast<int>(threadIdx.x) % 32, n = numerics::rotation_block(d);
  __syncwarp();
  for (int h = 1; h < n; h *= 2) {
    for (int i = lane; i < d / 2; i += 32) {
      const int j = i / h * 2 * h + i % h;
      const float a = x[j], b = x[j + h];
      x[j] = a + b, x[j + h] = a - b;
    }
    __syncwarp();
  }
  const float unit = numerics::rotation_unit(n);
  for (int c = lane; c < d; c += 32) x[c] *= unit;
}

}  // namespace detail

/// x ← x·R
__device__ inline void rotate(float* x, int d) {
  detail::flip_signs(x, d);
  detail::hadamard(x, d);
}

/// x ← x·Rᵀ
__device__ inline void rotate_back(float* x, int d) {
  detail::hadamard(x, d);
  detail::flip_signs(x, d);
}

}  // namespace sagebwd::cuda::plain
