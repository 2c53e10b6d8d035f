// SPDX-License-Identifier: Apache-2.0
// What happens to a thread's two rows of a tile beside their softmax: the mask, keys that hold NaN
// or Inf, and the sums of O.
#pragma once

#include <cmath>
#include <cstdint>

#include "cuda/sm90/fwd/softmax.cuh"
#include "cuda/sm90/fwd/work.cuh"
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

/// Makes NaN of rows that see a poisoned key of a tile, whose codes are zero: of O and LSE if its K
/// holds NaN or Inf, and of O, in all channels, if its V does. k_scale, v_scale: of the tile.
template <int kTile, int D>
__device__ __forceinline__ void spread_poison(Sums<D>& sums, const tile::Band& band, int nk,
                                              Corner at, const float* k_scale,
                                              const float* v_scale) {
  const int end = min(at.key + kTile, nk);
  bool of_k[2] = {false, false}, of_v[2] = {false, false};
#pragma unroll 1
  for (int key = at.key; key < end; ++key) {
    const int place = key % kTile / 16 * 16 + tile::place_of(key % 16);
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const int distance = key - (at.query + 8 * r);
      if (distance < band.begin || distance >= band.end) continue;
      of_k[r] |= k_scale[place] == kPoisonedScale, of_v[r] |= v_scale[place] == 0.0f;
    }
  }
#pragma unroll
  for (int r = 0; r < 2; ++r)
    if (of_k[r]) sums.sum[r] = NAN;
#pragma unroll
  for (int i = 0; i < D / 2; ++i)
    if (of_v[(i & 2) / 2]) sums.o[i] = NAN;
}

}  // namespace sagebwd::cuda::sm90::fwd
