// SPDX-License-Identifier: Apache-2.0
// The softmax of 64 queries and 128 keys of a warpgroup.
//
// P is relative to a reference exponent of its row, as O and the row sum are: P = 2^(logit -
// reference + kBias). The reference is near the row's largest logit at some earlier time. It moves
// only when half-precision sums would grow too large, so most tiles need no maximum before their
// exponentials, and O is rarely rescaled. P is rounded to half precision.
//
// Each key has a scale of its own, and the keys of an octave a centre (numerics/octaves.h).
//
// A row of O and of LSE has the same bits whatever the other rows and the keys that it does not see
// are, and wherever its tile is cut. So nothing here or in shares.cuh is found over keys that the
// mask hides from a row, no row does what another one needs, and a row that sees a whole tile gets
// the same numbers from the loop over masked tiles as from the one over whole tiles.
#pragma once

#include <cmath>
#include <cstdint>

#include "cuda/arch/half2.cuh"
#include "cuda/arch/scalar.cuh"
#include "cuda/sm90/fwd/shared.cuh"
#include "cuda/tile/codes.cuh"
#include "cuda/tile/quad.cuh"

namespace sagebwd::cuda::sm90::fwd {

using PerRow = float[2];  // rows lane/4 and lane/4 + 8 of the warp's 16
using Scores = int[64];   // element 4·j + 2·r + e: row r, key 8·j + 2·(lane % 4) + e

/// log2 of P at the reference: half precision then keeps 11 bits down to 2^-22 of the largest P and
/// some bits to 2^-32. A thread adds 16 pairs of them in half precision, so that sums are at most
/// 2^13 at the reference; kTooLarge leaves them room to grow.
inline constexpr float kBias = 8.0f, kTooLarge = 0x1p15f;
/// A reference that no row has: exponentials relative to it are infinite, hence too large.
inline constexpr float kNoReference = -1e30f;
/// A masked score. Adding kMagic makes the bits of -inf of it.
inline constexpr int kHidden = static_cast<int>(0xff800000u - static_cast<uint32_t>(tile::kMagic));

/// What a thread's two rows carry from tile to tile.
template <int D>
struct Sums {
  float o[D / 2];  // element 4·j + 2·r + e: row r, channel 8·j + 2·(lane % 4) + e
  PerRow sum;      // this lane's share of the sum of P

  __device__ Sums() {
#pragma unroll
    for (int i = 0; i < D / 2; ++i) o[i] = 0.0f;
#pragma unroll
    for (int r = 0; r < 2; ++r) sum[r] = 0.0f;
  }
};

/// P of a tile in half precision: element 2·j + r is row r, keys 8·j + 2·(lane % 4) and the next.
using Halves = uint32_t[32];

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
/// shrink_others(r, factor): shrinks what else the row has, by one lane.
template <int D, typename Shrink>
__device__ void raise(Sums<D>& sums, float* references, const PerRow& tops,
                      const Outgrown& outgrown, uint32_t lane, Shrink shrink_others) {
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    const float before = references[8 * r];
    __syncwarp();
    if (!outgrown.row[r]) continue;
    const float now = tops[r] > before ? tops[r] : before, shrink = arch::exp2_approx(before - now);
    if (lane % 4 == 0) references[8 * r] = now, shrink_others(r, shrink);
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

}  // namespace sagebwd::cuda::sm90::fwd
