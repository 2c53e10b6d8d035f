// SPDX-License-Identifier: Apache-2.0
// The softmax of a tile. Each key has a scale of its own, and the keys of an octave a centre
// (numerics/octaves.h).
//
// A row of O and of LSE has the same bits whatever the other rows and the keys that it does not see
// are, and wherever its tile is cut. So nothing here is found over keys that the mask hides from a
// row, no row does what another one needs, and a row that sees a whole tile gets the same numbers
// from the loop over masked tiles as from the one over whole tiles.
#pragma once

#include <cmath>
#include <cstdint>

#include "cuda/sm90/fwd/rows.cuh"
#include "cuda/sm90/fwd/softmax.cuh"
#include "numerics/quantize.h"

namespace sagebwd::cuda::sm90::fwd {

/// The numbers of a lane's keys among the i-th 16.
__device__ __forceinline__ float4 numbers_of(const float* of_keys, int i, uint32_t lane) {
  return *reinterpret_cast<const float4*>(of_keys + i * 16 + lane % 4 * 4);
}
/// That of the e-th key of element group 4·j of Scores, where j = 2·i + b.
__device__ __forceinline__ float number_of(const float4& x, int b, int e) {
  return b == 0 ? (e == 0 ? x.x : x.y) : (e == 0 ? x.z : x.w);
}

/// A score times the scale of its key, rounded once. Where scores may be hidden, -inf comes of
/// those; the product with the magic number is exact (numerics::key_scale_of).
template <bool kMasked>
__device__ __forceinline__ float scaled_score(int x, float scale) {
  if constexpr (kMasked)
    return fmaf(__int_as_float(x + tile::kMagic), scale, __fmul_rn(-tile::kMagicFloat, scale));
  return __fmul_rn(static_cast<float>(x), scale);
}

/// What turns scores times scales of keys into logits, in log2 units: a factor, and the logits of
/// the centres. The 128 keys that are visited at once may lie in kParts octaves.
template <int kParts>
struct RowLogits {
  PerRow factor, centre[kParts];
};

/// The largest logits of a thread's rows where scores may be hidden; kNoReference if there are
/// none. All lanes of a row get them.
template <int kParts>
__device__ inline void largest_logits(PerRow& tops, const Scores& x, const float* k_scale,
                                      const RowLogits<kParts>& logits, uint32_t lane) {
  constexpr int kEach = 8 / kParts;
#pragma unroll
  for (int part = 0; part < kParts; ++part) {
    PerRow most = {-INFINITY, -INFINITY};
#pragma unroll
    for (int i = 0; i < kEach; ++i) {
      const int at = part * kEach + i;
      const float4 scale = numbers_of(k_scale, at, lane);
#pragma unroll
      for (int n = 0; n < 8; ++n) {  // two blocks of two rows of two keys
        float& top = most[n / 2 % 2];
        top = fmaxf(top, scaled_score<true>(x[8 * at + n], number_of(scale, n / 4, n % 2)));
      }
    }
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const float most_here = tile::quad_max(most[r]),
                  top = most_here == -INFINITY
                            ? kNoReference
                            : fmaf(most_here, logits.factor[r], logits.centre[part][r]);
      tops[r] = part == 0 ? top : fmaxf(tops[r], top);
    }
  }
}

/// Notes the largest logits of a thread's rows: references of rows that have none, and for calls
/// that want them. references, most: those of the thread's first row.
__device__ __forceinline__ void note_largest(const PerRow& tops, float* references, float* most,
                                             bool wanted, uint32_t lane) {
  if (lane % 4 == 0)
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      if (references[8 * r] == kNoReference) references[8 * r] = tops[r];
      if (wanted && !(tops[r] <= most[8 * r])) most[8 * r] = tops[r];
    }
  __syncwarp();
}

/// What a row's first reference has above the logit of key 0. The largest logit may exceed that by
/// twice as much before a second pass is needed.
inline constexpr float kHeadroom = 6.0f;

/// The largest scale of V up to each of 128 keys, from the first one of its tile of kTile keys on,
/// by a warp: a lane has four keys.
template <int kTile>
__device__ __forceinline__ void find_prefixes(float* prefix, const float* v_scale, uint32_t lane) {
  constexpr uint32_t kLanes = kTile / 4;  // of a tile
  const auto two_at = [&](uint32_t key) {
    return *reinterpret_cast<const float2*>(
        v_scale + (key & ~15u) +
        static_cast<uint32_t>(tile::place_of(static_cast<int>(key & 15u))));
  };
  const float2 low = two_at(4 * lane), high = two_at(4 * lane + 2);
  float most[4] = {fmaxf(low.x, numerics::kLeastValueScale), low.y, high.x, high.y};
#pragma unroll
  for (int e = 1; e < 4; ++e) most[e] = fmaxf(most[e], most[e - 1]);
  float before = __shfl_up_sync(0xffffffffu, most[3], 1);
  if (lane % kLanes == 0) before = numerics::kLeastValueScale;
#pragma unroll
  for (uint32_t distance = 1; distance < kLanes; distance *= 2) {
    const float other = __shfl_up_sync(0xffffffffu, before, distance);
    if (lane % kLanes >= distance) before = fmaxf(before, other);
  }
  *reinterpret_cast<float4*>(prefix + 4 * lane) =
      make_float4(fmaxf(most[0], before), fmaxf(most[1], before), fmaxf(most[2], before),
                  fmaxf(most[3], before));
  __syncwarp();
}

/// The largest scale of V that a query sees in a tile of kTile keys. No scale is smaller than the
/// least that a value may have. end: of the keys. prefix, v_scale: of the tile.
template <int kTile>
__device__ __forceinline__ float value_top(const float* prefix, const float* v_scale,
                                           const tile::Band& band, int end, Corner at) {
  const int first = at.query + band.begin - at.key,
            last = min(min(at.query + band.end, end) - at.key, kTile) - 1;
  float top = last >= 0 ? prefix[last] : numerics::kLeastValueScale;
  if (first > 0) {  // a window hides the first keys
    top = numerics::kLeastValueScale;
#pragma unroll 1
    for (int key = first; key <= last; ++key)
      top = fmaxf(top, v_scale[(key & ~15) + tile::place_of(key & 15)]);
  }
  return top;
}

/// Notes the largest scales of V that a thread's rows see of 128 keys which the mask cuts, in tiles
/// of kTile. tops: that of the thread's first row. prefix: of the warp. at: of each tile.
template <int kTile>
__device__ __forceinline__ void note_value_tops(float* tops, float* prefix, const float* v_scale,
                                                const tile::Band& band, int end,
                                                const Corner (&at)[128 / kTile], uint32_t lane) {
  find_prefixes<kTile>(prefix, v_scale, lane);
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    float top = numerics::kLeastValueScale;
#pragma unroll
    for (int i = 0; i < 128 / kTile; ++i)
      top = fmaxf(top, value_top<kTile>(prefix + i * kTile, v_scale + i * kTile, band, end,
                                        {at[i].query + 8 * r, at[i].key}));
    if (lane % 4 == 0) tops[8 * r] = top;
  }
  __syncwarp();
}

/// Shares of V where all rows of a warp see all of 128 keys, as the kernel of codes makes them for
/// blocks. Notes the largest scale as note_value_tops does.
__device__ __forceinline__ void find_shares(__half* share, float* tops, const float* v_scale,
                                            uint32_t lane) {
  const float4 v = reinterpret_cast<const float4*>(v_scale)[lane];
  const float mine = fmaxf(fmaxf(v.x, v.y), fmaxf(fmaxf(v.z, v.w), numerics::kLeastValueScale)),
              top = __uint_as_float(__reduce_max_sync(0xffffffffu, __float_as_uint(mine))),
              inverse = arch::reciprocal_approx(top);
  reinterpret_cast<uint2*>(share)[lane] =
      make_uint2(arch::half2_of(value_share(v.x, inverse), value_share(v.y, inverse)),
                 arch::half2_of(value_share(v.z, inverse), value_share(v.w, inverse)));
  if (lane % 4 == 0) tops[0] = tops[8] = top;
  __syncwarp();
}

/// The rows of this thread whose sums call for a second pass in one of their lanes.
struct Outgrown {
  bool row[2];
  __device__ Outgrown(const PerRow& sum, uint32_t lane) {
#pragma unroll
    for (int r = 0; r < 2; ++r)
      row[r] = (__ballot_sync(0xffffffffu, sum[r] >= kTooLarge) >> (lane & 28u) & 15u) != 0;
  }
};

/// Raises the references of these rows to the largest logits of the tile. The other rows of the
/// warp repeat their numbers with the references that they have. references: that of the first row.
template <int D>
__device__ void raise(Sums<D>& sums, float* references, const PerRow& tops,
                      const Outgrown& outgrown, uint32_t lane) {
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    const float before = references[8 * r];
    __syncwarp();
    if (!outgrown.row[r]) continue;
    const float now = tops[r] > before ? tops[r] : before, shrink = arch::exp2_approx(before - now);
    if (lane % 4 == 0) references[8 * r] = now;
    sums.sum[r] = __fmul_rn(sums.sum[r], shrink);
#pragma unroll
    for (int i = 0; i < D / 2; ++i)
      if ((i & 2) == 2 * r) sums.o[i] = __fmul_rn(sums.o[i], shrink);
  }
  __syncwarp();
}

/// Scores become P. `sum`: this lane's sums. references: that of the thread's first row.
template <int D, bool kMasked, bool kAgain, int kParts>
__device__ __forceinline__ void exponentials(Halves& p, PerRow& sum, const Scores& x,
                                             const float* k_scale, const RowLogits<kParts>& logits,
                                             const float* references, uint32_t lane) {
  // With 64 channels there are registers to read ahead.
  constexpr bool kAhead = D == 64;
  float shift[kParts][2];
#pragma unroll
  for (int part = 0; part < kParts; ++part)
#pragma unroll
    for (int r = 0; r < 2; ++r) shift[part][r] = kBias - references[8 * r] + logits.centre[part][r];
  uint32_t total[2][2] = {};
  float4 next;
  if (kAhead) next = numbers_of(k_scale, 0, lane);
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    // Here the compiler does not make exponentials ahead of those before. Registers would not
    // suffice: it might then not pack any before it has all.
    const float4 ahead = next;
    if (kAhead && i < 7) next = numbers_of(k_scale, i + 1, lane);
    if (kMasked ? i % 4 == 3 : kAgain || i % 2 == 0) __syncwarp();
    const float4 scale = kAhead ? ahead : numbers_of(k_scale, i, lane);
#pragma unroll
    for (int b = 0; b < 2; ++b)
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        const int j = 2 * i + b;
        float y[2];
#pragma unroll
        for (int e = 0; e < 2; ++e)
          y[e] = arch::exp2_approx(
              fmaf(scaled_score<kMasked>(x[4 * j + 2 * r + e], number_of(scale, b, e)),
                   logits.factor[r], shift[i * kParts / 8][r]));
        p[2 * j + r] = arch::half2_of(y[0], y[1]);
        total[r][b] = arch::half2_add(total[r][b], p[2 * j + r]);
      }
  }
#pragma unroll
  for (int r = 0; r < 2; ++r) sum[r] = arch::half2_sum(arch::half2_add(total[r][0], total[r][1]));
}

/// Limits P of rows that have got their largest logits as references. No logit exceeds these, but
/// those of huge logits are rounded to many units.
__device__ __forceinline__ void limit(Halves& p, PerRow& sum, const Outgrown& outgrown) {
  constexpr uint32_t kOne = 0x5c005c00u, kInfinite = 0x7c007c00u;  // 2^kBias, twice
  static_assert(kBias == 8.0f);
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    const uint32_t most = outgrown.row[r] ? kOne : kInfinite;
    uint32_t total[2] = {};
#pragma unroll
    for (int j = 0; j < 16; ++j) {
      uint32_t& h = p[2 * j + r];
      h = arch::half2_min(h, most), total[j % 2] = arch::half2_add(total[j % 2], h);
    }
    sum[r] = arch::half2_sum(arch::half2_add(total[0], total[1]));
  }
}

/// Multiplies P by V's share where rows see different keys: each has shares of its own, relative to
/// the largest scale that it sees. They are the numbers that the kernel of codes has written
/// (value_share) for rows that see all of the tile. tops: those of the thread's first row.
__device__ __forceinline__ void multiply_by_own_shares(Halves& p, const float* tops,
                                                       const float* v_scale, uint32_t lane) {
  const PerRow inverse = {arch::reciprocal_approx(tops[0]), arch::reciprocal_approx(tops[8])};
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    const float4 scale = numbers_of(v_scale, i, lane);
#pragma unroll
    for (int b = 0; b < 2; ++b)
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        uint32_t& h = p[4 * i + 2 * b + r];
        h = arch::half2_mul(h, arch::half2_of(value_share(number_of(scale, b, 0), inverse[r]),
                                              value_share(number_of(scale, b, 1), inverse[r])));
      }
  }
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
