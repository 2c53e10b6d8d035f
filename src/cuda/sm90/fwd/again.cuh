// SPDX-License-Identifier: Apache-2.0
// Scores of one warp, made again for the rare second pass of the softmax.
#pragma once

#include <cstddef>
#include <cstdint>

#include "cuda/arch/mma_sync.cuh"
#include "cuda/arch/wgmma.cuh"
#include "cuda/sm90/fwd/softmax.cuh"

namespace sagebwd::cuda::sm90::fwd {

/// S = Q8·K8ᵀ for the 16 queries of one warp and 2·kCount keys, while the others go on. Slow, and
/// rarely needed. row: the lane's first.
template <int D, size_t kCount>
__device__ void scores_of_warp(int (&x)[kCount], const uint8_t* q, const uint8_t* k, uint32_t row,
                               uint32_t lane) {
  const auto word = [](const uint8_t* operand, uint32_t at, uint32_t byte) {
    return *reinterpret_cast<const uint32_t*>(operand + arch::swizzled<D>(at * D + byte));
  };
  int sums[kCount / 4][4];  // in local memory: a loop that is not unrolled takes few registers
#pragma unroll 1
  for (uint32_t j = 0; j < kCount / 4; ++j) {
    const uint32_t key = j * 8 + lane / 4;
    int acc[4] = {0, 0, 0, 0};
#pragma unroll 1
    for (uint32_t byte = lane % 4 * 4; byte < D; byte += 32) {
      const uint32_t a[4] = {word(q, row, byte), word(q, row + 8, byte), word(q, row, byte + 16),
                             word(q, row + 8, byte + 16)};
      arch::mma_8(acc, a, word(k, key, byte), word(k, key, byte + 16));
    }
    *reinterpret_cast<int4*>(sums[j]) = make_int4(acc[0], acc[1], acc[2], acc[3]);
  }
#pragma unroll
  for (size_t i = 0; i < kCount; ++i) x[i] = sums[i / 4][i % 4];
}

}  // namespace sagebwd::cuda::sm90::fwd
