// SPDX-License-Identifier: Apache-2.0
// Transposition inside a warp.
#pragma once

#include <cstdint>

namespace sagebwd::cuda::arch {

/// An 8x8 matrix of 16-bit elements, lane 4g + t holding columns 2t, 2t + 1 of row g, transposed.
__device__ __forceinline__ uint32_t transpose_8x8(uint32_t x) {
  uint32_t y;
  asm("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(y) : "r"(x));
  return y;
}

}  // namespace sagebwd::cuda::arch
