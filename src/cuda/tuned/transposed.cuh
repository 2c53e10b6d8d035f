// SPDX-License-Identifier: Apache-2.0
// Transposed codes: rows in shared memory become columns in the workspace.
#pragma once

#include <cstdint>

#include "cuda/tile/codes.cuh"
#include "cuda/tile/layout.h"

namespace sagebwd::cuda::tuned {

/// Where a token's word of four codes lies in shared memory. The exclusive or spreads what is
/// accessed together over different banks: four slots when codes are written, and four pieces of
/// 16 tokens when they are read.
template <int D>
__device__ __forceinline__ uint32_t word_at(uint32_t token, uint32_t word) {
  return (token * (D / 4) + word) ^ (((token >> 4 ^ token >> 1) & 3) << 3);
}

/// Writes transposed rows, after a barrier. Each thread turns 16 tokens x 4 channels into four
/// 16-byte pieces, in the order that matches A operands made from accumulators (tile/codes.cuh).
/// row0: the first token. kTurned: tokens are in the order of tile::turned, and channels in that
/// of tile::turned_row, so that a lane holds sums of neighbouring channels.
template <int D, bool kTurned>
__device__ __forceinline__ void write_transposed(int8_t* to, int64_t row0, const uint32_t* codes,
                                                 uint32_t thread) {
  const uint32_t piece = thread % 4 + thread / D * 4;  // 16 tokens
  const uint32_t c = thread % D / 4 * 4;
  // Where words of tokens 2k and 2k + 1 of the piece lie, but for the tokens before them: word_at,
  // taken apart so that a load adds a constant at most.
  const uint32_t* base[4][2];
#pragma unroll
  for (uint32_t k = 0; k < 4; ++k) {
    const uint32_t at = word_at<D>(piece * 16 + 2 * k, c / 4) - 2 * k * (D / 4);
    base[k][0] = codes + at;
    base[k][1] = D == 128 ? base[k][0] + D / 4 : codes + (at ^ (D / 4));
  }
  uint32_t out[4][4];  // [channel][word]
#pragma unroll
  for (int w = 0; w < 4; ++w) {
    uint32_t r[4];
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      const int at = kTurned ? tile::turned(4 * w + e) : tile::permuted(4 * w + e);
      r[e] = base[at / 2 % 4][at % 2][at / 2 * 2 * (D / 4)];
    }
    tile::transpose_4x4(r);
#pragma unroll
    for (int e = 0; e < 4; ++e) out[e][w] = r[e];
  }
  to += row0 * D + piece / (kSlab / 16) * (D * kSlab) + piece % (kSlab / 16) * 16;
#pragma unroll
  for (int e = 0; e < 4; ++e) {
    const int row = static_cast<int>(c) + e;
    __stcs(reinterpret_cast<uint4*>(to + (kTurned ? tile::turned_row(row) : row) * kSlab),
           make_uint4(out[e][0], out[e][1], out[e][2], out[e][3]));
  }
}

}  // namespace sagebwd::cuda::tuned
