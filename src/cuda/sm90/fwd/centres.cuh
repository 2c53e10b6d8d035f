// SPDX-License-Identifier: Apache-2.0
// The logits of the centres of K (numerics/octaves.h), which queries of a piece of work have once
// and for all. Both forwards share it.
#pragma once

#include <cstdint>

#include "cuda/arch/wgmma.cuh"
#include "cuda/sm90/formats.h"
#include "cuda/sm90/operand.cuh"

namespace sagebwd::cuda::sm90::fwd {

/// logits: of each octave and query of the piece, from a thread's first row on. By a product of
/// codes, which leaves `dots`. It has 64 columns; those behind kCentreRows are of whatever lies
/// there, and nobody looks at them. factor: that of the thread's first row.
template <int D, int kQueries>
__device__ __forceinline__ void find_centre_logits(int (&dots)[32],
                                                   float (&logits)[kCentreRows][kQueries],
                                                   const Operand<D>& queries,
                                                   const Operand<D>& centres, const float* scale,
                                                   const float* factor, int row, uint32_t lane) {
  arch::settle(dots);
  arch::wgmma_fence();
#pragma unroll
  for (int step = 0; step < D / 32; ++step)
    arch::wgmma_8(dots, queries.step(step), centres.step(step), step > 0);
  arch::wgmma_commit();
  arch::wgmma_wait<0>();
  arch::settle(dots);
#pragma unroll
  for (int i = 0; i < kCentreRows / 2; ++i) {
    const int octave = i / 4 * 8 + static_cast<int>(lane % 4 * 2) + i % 2, r = i / 2 % 2;
    logits[octave][row + 8 * r] = static_cast<float>(dots[i]) * scale[octave] * factor[8 * r];
  }
}

}  // namespace sagebwd::cuda::sm90::fwd
