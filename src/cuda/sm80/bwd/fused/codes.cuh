// SPDX-License-Identifier: Apache-2.0
// Codes of P and dS in the fused backward: their scales, and how warps hand them to each other.
//
// A scale comes from the largest magnitude of several warps. They meet by integer atomicMax in
// shared memory; behind a barrier all read the result, and behind another all codes are there.
// The two recipes differ in nothing but RowScales and TileScales.
#pragma once

#include <cstddef>
#include <type_traits>

#include "cuda/arch/scalar.cuh"
#include "cuda/arch/transpose.cuh"
#include "cuda/sm80/bwd/fused/shared.cuh"
#include "cuda/tile/codes.cuh"
#include "numerics/quantize.h"

namespace sagebwd::cuda::sm80::fused_backward {

// Smaller scales become this: nothing real is that small, and its reciprocal is finite.
inline constexpr float kSmallestScale = 0x1p-120f;

using PerQuery = float[2][4];  // one number for each of the lane's queries [column][block]
// A operands of half a contraction step: rows g and g + 8.
using KeyCodes = uint32_t[kKeyBlocks][kQueryBlocks / 2][2];

/// This warp's codes of a tile.
struct TileCodes {
  KeyCodes p, ds;        // keys are rows: for dV and dK
  uint32_t query[2][4];  // of dS, queries are rows: for dQ. RowScales alone leaves it here.
};

/// One step of a reduction over lanes that differ in `bit`: a lane keeps half of its numbers and
/// gives the other half away.
template <int kHalf, int kCount, class Join>
__device__ void halve(float (&x)[kCount], uint32_t lane, uint32_t bit, Join join) {
  const bool upper = (lane & bit) != 0;
#pragma unroll
  for (int c = 0; c < kHalf; ++c) {
    const float keep = upper ? x[c + kHalf] : x[c], give = upper ? x[c] : x[c + kHalf];
    x[c] = join(keep, __shfl_xor_sync(0xffffffffu, give, bit));
  }
}
template <int kHalf, int kCount>
__device__ void halve(float (&top)[kCount], uint32_t lane, uint32_t bit) {
  halve<kHalf>(top, lane, bit, [](float a, float b) { return arch::max_nan(a, b); });
}
/// Which block and column of its warp's queries a lane is left with, behind three steps over the
/// eight lanes that hold a query.
struct QueryOfLane {
  uint32_t block, column;
};
template <Config kConfig>
__device__ QueryOfLane query_of_lane(const Thread<kConfig>& me) {
  return {me.lane() / 16 % 2 * 2 + me.lane() / 8 % 2, 2 * me.t() + me.lane() / 4 % 2};
}

template <tile::Bytes kCode>
__device__ void quantize(KeyCodes& codes, const Scores& x, const PerKey& inverses) {
#pragma unroll
  for (int m = 0; m < kKeyBlocks; ++m)
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const float inverse = inverses[m][r];
#pragma unroll
      for (int n = 0; n < kQueryBlocks; n += 2)
        codes[m][n / 2][r] =
            tile::codes_of<kCode>(x[m][n][2 * r], inverse, x[m][n][2 * r + 1], inverse,
                                  x[m][n + 1][2 * r], inverse, x[m][n + 1][2 * r + 1], inverse);
    }
}

/// Hands codes of this warp to all warps of its key strip; `to` is Thread::kPCodes or kDsCodes.
template <Config kConfig>
__device__ void put_key_codes(const Thread<kConfig>& me, uint32_t to, const KeyCodes& codes) {
#pragma unroll
  for (int m = 0; m < kKeyBlocks; ++m)
    at<uint4>(me.shared + to + me.index * 16 + m * kConfig.threads() * 16) =
        make_uint4(codes[m][0][0], codes[m][0][1], codes[m][1][0], codes[m][1][1]);
}
/// Hands the codes of 16 queries, of the n-th two blocks of 8, to all warps of its query strip.
template <Config kConfig>
__device__ void put_query_codes(const Thread<kConfig>& me, int n, const uint32_t (&a)[2][2]) {
  at<uint4>(me.shared + me.kQueryCodes + me.index * 16 + n * kConfig.threads() * 16) =
      make_uint4(a[0][0], a[0][1], a[1][0], a[1][1]);
}

/// Hands on codes with one scale per query, turned so that queries are rows.
template <Config kConfig>
__device__ void quantize_queries(const Thread<kConfig>& me, uint32_t (&mine)[2][4], const Scores& y,
                                 const PerQuery& inverse) {
#pragma unroll
  for (int n = 0; n < kQueryBlocks; n += 2) {
    uint32_t a[kKeyBlocks][2];
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const float i0 = inverse[0][n + h], i1 = inverse[1][n + h];
#pragma unroll
      for (int m = 0; m < kKeyBlocks; ++m) {
        const float(&v)[4] = y[m][n + h];
        a[m][h] = arch::transpose_8x8(
            tile::codes_of<tile::Bytes::s8>(v[0], i0, v[2], i0, v[1], i1, v[3], i1));
      }
    }
    put_query_codes(me, n / 2, a);
#pragma unroll
    for (int i = 0; i < 4; ++i) mine[n / 2][i] = a[i / 2][i % 2];
  }
}

/// The scales of all recipes but `paper`: P and dS have one per key for dV and dK, dS has one per
/// query for dQ.
template <Config kConfig>
struct RowScales {
  using Maxima = typename SharedPlan<kConfig>::Maxima;
  static constexpr uint32_t kP = offsetof(Maxima, p), kDs = offsetof(Maxima, ds),
                            kQuery = offsetof(Maxima, query);
  static constexpr float kUnit = 1.0f / numerics::kLevels;
  // Dithered codes stay inside the levels, though the largest may be off by a few roundings.
  static constexpr float kQueryUnit = kConfig.dithers_dq() ? kUnit * (1.0f + 0x1p-20f) : kUnit;

  const Thread<kConfig>& me;
  uint32_t maxima, tile_scales;  // Thread::maxima_at and tile_scales_at of the tile's buffer

  __device__ static void reset(const Thread<kConfig>& me, int buffer) {
    constexpr uint32_t kCount = sizeof(Maxima) / 4, kThreads = kConfig.threads();
#pragma unroll
    for (uint32_t i = 0; i < kCount; i += kThreads)
      if (kCount % kThreads == 0 || i + me.index < kCount)
        at<float>(me.maxima_at(buffer) + (i + me.index) * 4) = kSmallestScale;
  }

  /// Before the first barrier.
  __device__ void share(const Scores& prob, const Scores& y, float p_unit) const {
    share_p(maxima + kP, prob, p_unit);
    share_ds(maxima + kDs, y);
    share_queries(maxima + kQuery, y);
  }

  // NaN and Inf stay in the scales of their rows, and there is nothing to part.
  __device__ bool p_is_finite() const { return true; }
  __device__ bool ds_is_finite() const { return true; }
  __device__ void part_poisoned(int, const Scores&, const Scores&, float) const {}

  /// Between the barriers.
  __device__ void make_codes(TileCodes& codes, const Scores& prob, const Scores& y, int) const {
    // All inverses at once: one wait for shared memory and reciprocals instead of three.
    PerKey p_inverse, ds_inverse;
    PerQuery query_inverse;
    key_inverses(p_inverse, maxima + kP);
    key_inverses(ds_inverse, maxima + kDs);
    query_inverses(query_inverse, maxima + kQuery);
    quantize<tile::Bytes::u8>(codes.p, prob, p_inverse);
    put_key_codes(me, me.kPCodes, codes.p);
    quantize<tile::Bytes::s8>(codes.ds, y, ds_inverse);
    put_key_codes(me, me.kDsCodes, codes.ds);
    quantize_queries(me, codes.query, y, query_inverse);
    if constexpr (kCode<kConfig>.shares_dq_scales) scale_dq();
  }

  // Where a lane finds the scales of its four keys, and of its four queries as rows of dQ.
  __device__ uint32_t of_p(bool) const { return me.keys_of(maxima + kP); }
  __device__ uint32_t of_ds(bool) const { return me.keys_of(maxima + kDs); }
  __device__ uint32_t of_queries(bool) const {
    if constexpr (kCode<kConfig>.shares_dq_scales)
      return me.query_rows_of(me.dq_scales());
    else
      return me.query_rows_of(maxima + kQuery);
  }

 protected:
  /// Scales of the queries of a tile, times that of dQ's keys.
  __device__ void scale_dq() const {
    static_assert(kConfig.tile_q() <= kConfig.threads());
    if (me.index < kConfig.tile_q())
      at<float>(me.dq_scales() + me.index * 4) =
          at<float>(maxima + kQuery + me.index * 4) * me.dq_key_scale();
  }
  /// From the largest magnitudes of a lane's four keys. Four lanes hold a key; each is left with
  /// one.
  __device__ void share_keys(uint32_t to, float (&top)[2 * kKeyBlocks], float unit) const {
    halve<2>(top, me.lane(), 2);
    halve<1>(top, me.lane(), 1);
    atomicMax(&at<uint32_t>(to + me.key_strip() * 128 + me.lane() * 4),
              __float_as_uint(top[0] * unit));
  }
  /// P is not negative, so it has the order of its bits (NaN on top).
  __device__ void share_p(uint32_t to, const Scores& prob, float unit) const {
    float top[2 * kKeyBlocks];
#pragma unroll
    for (int i = 0; i < 2 * kKeyBlocks; ++i) {
      int most = 0;
#pragma unroll
      for (int n = 0; n < kQueryBlocks; ++n)
        most = __vimax3_s32(most, __float_as_int(prob[i / 2][n][i % 2 * 2]),
                            __float_as_int(prob[i / 2][n][i % 2 * 2 + 1]));
      top[i] = __int_as_float(most);
    }
    share_keys(to, top, unit);
  }
  __device__ void share_ds(uint32_t to, const Scores& y) const {
    float top[2 * kKeyBlocks];
#pragma unroll
    for (int i = 0; i < 2 * kKeyBlocks; ++i) {
      const float(&v)[kQueryBlocks][4] = y[i / 2];
      top[i] = arch::max_nan(fabsf(v[0][i % 2 * 2]), fabsf(v[0][i % 2 * 2 + 1]));
#pragma unroll
      for (int n = 1; n < kQueryBlocks; ++n)
#pragma unroll
        for (int e = i % 2 * 2; e < i % 2 * 2 + 2; ++e)
          top[i] = arch::max_nan(top[i], fabsf(v[n][e]));
    }
    share_keys(to, top, kUnit);
  }
  /// Eight lanes hold a query.
  __device__ void share_queries(uint32_t to, const Scores& y) const {
    float top[2 * kQueryBlocks];
#pragma unroll
    for (int c = 0; c < 2 * kQueryBlocks; ++c) {
      const auto most = [&](int m) {
        return arch::max_nan(fabsf(y[m][c / 2][c % 2]), fabsf(y[m][c / 2][c % 2 + 2]));
      };
      top[c] = arch::max_nan(most(0), most(1));
    }
    halve<4>(top, me.lane(), 16);
    halve<2>(top, me.lane(), 8);
    halve<1>(top, me.lane(), 4);
    const QueryOfLane query = query_of_lane(me);
    atomicMax(&at<uint32_t>(to + (me.first_query() + query.column * 4 + query.block) * 4),
              __float_as_uint(top[0] * kQueryUnit));
  }

  __device__ void key_inverses(PerKey& x, uint32_t from) const {
    get_four(x, me.keys_of(from));
#pragma unroll
    for (int m = 0; m < kKeyBlocks; ++m)
#pragma unroll
      for (int r = 0; r < 2; ++r) x[m][r] = arch::reciprocal_approx(x[m][r]);
  }
  __device__ void query_inverses(PerQuery& x, uint32_t from) const {
#pragma unroll
    for (int e = 0; e < 2; ++e) {
      const float4 v = at<float4>(from + me.first_query() * 4 + me.t() * 32 + e * 16);
      x[e][0] = arch::reciprocal_approx(v.x), x[e][1] = arch::reciprocal_approx(v.y);
      x[e][2] = arch::reciprocal_approx(v.z), x[e][3] = arch::reciprocal_approx(v.w);
    }
  }
};

/// The scales of `paper`: P and dS have one each for all of the tile.
template <Config kConfig>
struct TileScales {
  using Rows = RowScales<kConfig>;
  static constexpr float kUnit = Rows::kUnit;

  const Thread<kConfig>& me;
  uint32_t maxima, tile_scales;  // Thread::maxima_at and tile_scales_at of the tile's buffer

  __device__ static void reset(const Thread<kConfig>& me, int buffer) {
    if (me.index < 8) at<float>(me.tile_scales_at(buffer) + me.index * 4) = kSmallestScale;
  }

  /// Before the first barrier. A warp reduces its maxima with one instruction each.
  __device__ void share(const Scores& prob, const Scores& y, float p_unit) const {
    int most = 0;
    float top = 0.0f;
#pragma unroll
    for (int m = 0; m < kKeyBlocks; ++m)
#pragma unroll
      for (int n = 0; n < kQueryBlocks; ++n)
#pragma unroll
        for (int e = 0; e < 4; e += 2) {
          most =
              __vimax3_s32(most, __float_as_int(prob[m][n][e]), __float_as_int(prob[m][n][e + 1]));
          top = arch::max_nan(top, arch::max_nan(fabsf(y[m][n][e]), fabsf(y[m][n][e + 1])));
        }
    most = static_cast<int>(__reduce_max_sync(0xffffffffu, static_cast<uint32_t>(most)));
    top = __uint_as_float(__reduce_max_sync(0xffffffffu, __float_as_uint(top)));
    if (me.lane() < 8)
      atomicMax(&at<uint32_t>(tile_scales + me.lane() * 4),
                __float_as_uint(me.lane() < 4 ? __int_as_float(most) * p_unit : top * kUnit));
  }

  __device__ bool p_is_finite() const { return numerics::is_finite(p_scale()); }
  __device__ bool ds_is_finite() const { return numerics::is_finite(ds_scale()); }
  /// For a tile that holds NaN or Inf: gives every row a scale of its own. That is the scale of
  /// what is finite in the tile, and NaN for keys and queries that are not. All threads come here.
  __device__ void part_poisoned(int buffer, const Scores& prob, const Scores& y,
                                float p_unit) const {
    const uint32_t maxima = me.maxima_at(buffer), tile_scales = me.tile_scales_at(buffer);
    constexpr int kTileQ = kConfig.tile_q(), kTileK = kConfig.tile_k();
    __syncthreads();  // all have read the scales that are not finite
    reset(me, buffer);
    __syncthreads();
    float top_p = 0.0f, top_ds = 0.0f;
    each(prob, y, [&](float px, float dy, int, int, int) {
      top_p = fmaxf(top_p, px < INFINITY ? px : 0.0f);
      top_ds = fmaxf(top_ds, fabsf(dy) < INFINITY ? fabsf(dy) : 0.0f);
    });
    atomicMax(&at<uint32_t>(tile_scales), __float_as_uint(top_p * p_unit));
    atomicMax(&at<uint32_t>(tile_scales + 16), __float_as_uint(top_ds * kUnit));
    __syncthreads();
    static_assert(kTileK <= kConfig.threads() && kTileQ <= kConfig.threads());
    const float ds = at<float>(tile_scales + 16);
    if (me.index < kTileK) {
      at<float>(maxima + Rows::kP + me.index * 4) = at<float>(tile_scales);
      at<float>(maxima + Rows::kDs + me.index * 4) = ds;
    }
    if (me.index < kTileQ) at<float>(maxima + Rows::kQuery + me.index * 4) = ds;
    __syncthreads();
    constexpr uint32_t kNan = 0x7fffffff;
    // In the order of place_of_row.
    const uint32_t keys = me.keys_of(maxima),
                   queries = maxima + Rows::kQuery + me.first_query() * 4 + me.t() * 32;
    each(prob, y, [&](float px, float dy, int row, int n, int e) {
      if (px - px != 0.0f) at<uint32_t>(keys + Rows::kP + row * 4) = kNan;
      if (dy - dy != 0.0f)
        at<uint32_t>(keys + Rows::kDs + row * 4) = at<uint32_t>(queries + e * 16 + n * 4) = kNan;
    });
    __syncthreads();
  }
  /// Between the barriers.
  __device__ void make_codes(TileCodes& codes, const Scores& prob, const Scores& y, int) const {
    PerKey inverse;
    fill(inverse, arch::reciprocal_approx(p_scale()));
    quantize<tile::Bytes::u8>(codes.p, prob, inverse);
    put_key_codes(me, me.kPCodes, codes.p);
    fill(inverse, arch::reciprocal_approx(ds_scale()));
    quantize<tile::Bytes::s8>(codes.ds, y, inverse);
    put_key_codes(me, me.kDsCodes, codes.ds);
    turn(codes.ds);
  }

  // As in RowScales; a poisoned tile has a scale for each row.
  __device__ uint32_t of_p(bool poisoned) const {
    return !poisoned ? tile_scales : me.keys_of(maxima + Rows::kP);
  }
  __device__ uint32_t of_ds(bool poisoned) const {
    return !poisoned ? tile_scales + 16 : me.keys_of(maxima + Rows::kDs);
  }
  __device__ uint32_t of_queries(bool poisoned) const {
    return !poisoned ? tile_scales + 16 : me.query_rows_of(maxima + Rows::kQuery);
  }

  __device__ float p_scale() const { return at<float>(tile_scales); }
  __device__ float ds_scale() const { return at<float>(tile_scales + 16); }

 private:
  __device__ static void fill(PerKey& x, float value) {
    x[0][0] = x[0][1] = x[1][0] = x[1][1] = value;
  }
  /// dS has the same codes for keys and queries: bytes change places, and queries are rows.
  __device__ void turn(const KeyCodes& codes) const {
#pragma unroll
    for (int n = 0; n < kQueryBlocks; n += 2) {
      uint32_t a[kKeyBlocks][2];
#pragma unroll
      for (int m = 0; m < kKeyBlocks; ++m) {
        const uint32_t(&rows)[2] = codes[m][n / 2];
        a[m][0] = arch::transpose_8x8(arch::byte_permute(rows[0], rows[1], 0x5140));
        a[m][1] = arch::transpose_8x8(arch::byte_permute(rows[0], rows[1], 0x7362));
      }
      put_query_codes(me, n / 2, a);
    }
  }
  /// Calls `use` with P, dS, which of the lane's four keys, and which block and column of queries.
  template <class Use>
  __device__ static void each(const Scores& prob, const Scores& y, Use use) {
#pragma unroll
    for (int m = 0; m < kKeyBlocks; ++m)
#pragma unroll
      for (int n = 0; n < kQueryBlocks; ++n)
#pragma unroll
        for (int e = 0; e < 4; ++e) use(prob[m][n][e], y[m][n][e], 2 * m + e / 2, n, e % 2);
  }
};

}  // namespace sagebwd::cuda::sm80::fused_backward
