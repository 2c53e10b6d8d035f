// SPDX-License-Identifier: Apache-2.0
// What happens to a thread's two rows of a tile beside their softmax: the mask, the largest logits,
// and keys that hold NaN or Inf. The dense forward and the one with block lists share it.
#pragma once

#include <cmath>
#include <cstdint>

#include "cuda/sm90/fwd/softmax.cuh"
#include "cuda/sm90/fwd/work.cuh"
#include "cuda/sm90/params.h"
#include "cuda/tile/codes.cuh"
#include "cuda/tile/sequence.cuh"

namespace sagebwd::cuda::sm90::fwd {

/// Where a tile is: its first query, of the thread's rows, and its first key, in the sequence.
struct Corner {
  int query, key;
};

/// Hides what the mask hides of kKeys keys, and what is after the last key. `x`: their scores.
template <int kKeys>
__device__ __forceinline__ void hide_keys(int* x, const tile::Band& band, const tile::Sequence& s,
                                          Corner at, uint32_t lane) {
  const int key0 = at.key + static_cast<int>(lane % 4 * 2);
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    const int query = at.query + 8 * r, begin = query + band.begin;
    const uint32_t here = static_cast<uint32_t>(key0 - begin);
    const uint32_t seen =
        query < s.nq
            ? static_cast<uint32_t>(min(static_cast<int>(band.width()), max(s.nk - begin, 0)))
            : 0;
#pragma unroll
    for (int j = 0; j < kKeys / 8; ++j)
#pragma unroll
      for (int e = 0; e < 2; ++e)
        if (here + 8 * j + e >= seen) x[4 * j + 2 * r + e] = kHidden;
  }
}

/// O += unit·(products of 64 channels).
template <int D>
__device__ __forceinline__ void add_product(Sums<D>& sums, int part, const int (&acc)[32],
                                            const PerRow& unit) {
#pragma unroll
  for (int i = 0; i < 32; ++i)
    sums.o[part * 32 + i] =
        fmaf(static_cast<float>(acc[i]), unit[(i & 2) / 2], sums.o[part * 32 + i]);
}

}  // namespace sagebwd::cuda::sm90::fwd
