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

template <int kKeys>
__device__ __forceinline__ void hide_keys(int* x, const MaskParams& mask, const tile::Sequence& s,
                                          Corner at, uint32_t lane) {
  hide_keys<kKeys>(x, tile::band_of(mask, s), s, at, lane);
}

/// Notes the largest logits, for calls that want them. A row has one lane that writes. `tops`: of
/// the thread's first row.
template <int kParts>
__device__ __forceinline__ void note_logits(const Scores& x, const Factors<kParts>& factor,
                                            float* tops, uint32_t lane) {
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    const float top = row_top(x, r, factor);
    float& most = tops[8 * r];
    if (lane % 4 == 0 && !(top <= most)) most = top;
  }
}

/// Makes NaN of rows that see a poisoned key of a tile, whose codes are zero: of O and LSE if its K
/// holds NaN or Inf, and of O, in all channels, if its V does. k_scale: of the keys of the
/// sequence; null: no key of the tile has a poisoned K.
template <int kKeys, int D>
__device__ __forceinline__ void spread_poison(Sums<D>& sums, const MaskParams& mask,
                                              const tile::Sequence& s, Corner at,
                                              const KeyScale* k_scale, const __half* share) {
  const tile::Band band = tile::band_of(mask, s);
  const int end = min(at.key + kKeys, s.nk);
  bool of_k[2] = {false, false}, of_v[2] = {false, false};
#pragma unroll 1
  for (int key = at.key; key < end; ++key) {
    const float scale = k_scale != nullptr ? k_scale[key].scale : 0.0f;
    const int place = key % kKeys / 16 * 16 + tile::place_of(key % 16);
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const int distance = key - (at.query + 8 * r);
      if (distance < band.begin || distance >= band.end) continue;
      of_k[r] |= scale != scale, of_v[r] |= __half_as_ushort(share[place]) == kPoisonedShare;
    }
  }
#pragma unroll
  for (int r = 0; r < 2; ++r)
    if (of_k[r]) sums.sum[r] = NAN;
#pragma unroll
  for (int i = 0; i < D / 2; ++i)
    if (of_v[(i & 2) / 2]) sums.o[i] = NAN;
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
