// SPDX-License-Identifier: Apache-2.0
// The centres of K and V (numerics/octaves.h): the logits of those of K, which queries of a piece
// of work have once and for all, and what those of V add to O. Both forwards share it.
#pragma once

#include <cstdint>

#include "cuda/arch/wgmma.cuh"
#include "cuda/sm90/formats.h"
#include "cuda/sm90/fwd/softmax.cuh"
#include "cuda/sm90/operand.cuh"
#include "cuda/tile/convert.cuh"

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

/// O += Σ (sum of P over the octave)·centre of V. weight(octave, r): that sum, of the thread's r-th
/// row, times the scale of the centre. By products of codes, which are exact in 16 bit, and of the
/// weights in two parts of 16 bit. octaves: how many there may be.
template <int D, typename Weight>
__device__ __forceinline__ void add_value_centres(Sums<D>& sums, const Operand<64>& centres,
                                                  int octaves, uint32_t lane, Weight weight) {
#pragma unroll 1
  for (int step = 0; 16 * step < octaves; ++step) {
    uint32_t parts[2][4];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int octave = 16 * step + i / 2 * 8 + static_cast<int>(lane % 4 * 2);
      const float low = weight(octave, i % 2), high = weight(octave + 1, i % 2);
      const uint32_t most = tile::pack_16<__nv_bfloat16>(low, high);
      parts[0][i] = most;
      parts[1][i] = tile::pack_16<__nv_bfloat16>(low - __uint_as_float(most << 16),
                                                 high - __uint_as_float(most & 0xffff0000u));
    }
    arch::settle(parts[0]), arch::settle(parts[1]);
#pragma unroll
    for (int part = 0; part < D / 64; ++part) {
      float acc[32];  // not O itself: that may be in any registers
      const uint64_t b = centres.from_row(64 * part).step(step);
      arch::settle(acc);
      arch::wgmma_fence();
      arch::wgmma_bf16(acc, parts[0], b, false);
      arch::wgmma_bf16(acc, parts[1], b, true);
      arch::wgmma_commit();
      arch::wgmma_wait<0>();
      arch::settle(acc);
#pragma unroll
      for (int i = 0; i < 32; ++i) sums.o[32 * part + i] += acc[i];
    }
    arch::settle(parts[0]), arch::settle(parts[1]);
  }
}

}  // namespace sagebwd::cuda::sm90::fwd
