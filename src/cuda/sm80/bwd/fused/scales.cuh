// SPDX-License-Identifier: Apache-2.0
// Scales of the codes of P and dS in the fused backward: largest magnitudes of the keys and queries
// of a tile. Warps that share keys or queries meet by integer atomicMax in shared memory.
#pragma once

#include "cuda/arch/scalar.cuh"
#include "cuda/sm80/bwd/fused/lane.cuh"
#include "numerics/quantize.h"

namespace sagebwd::cuda::sm80 {

template <class Shape>
struct FusedScales : FusedLane<Shape> {
  using Lane = FusedLane<Shape>;
  using Lane::get_rows, Lane::group, Lane::lane, Lane::maxima_at, Lane::my_queries, Lane::t,
      Lane::thread;
  using typename Lane::Rows, typename Lane::Scores, typename Lane::Shared;
  static constexpr int kM = Shape::kM, kQueryBlocks = Shape::kQueryBlocks;
  // Scales below this are this: nothing real is that small, and its reciprocal is finite.
  static constexpr float kSmallest = 0x1p-120f;

  using Lane::Lane;
  template <typename V>
  __device__ V& at(uint32_t address) const {
    return Lane::template at<V>(address);
  }

  __device__ void reset(int buffer) {
    constexpr uint32_t kCount = sizeof(typename Shared::Maxima) / 4;
#pragma unroll
    for (uint32_t i = 0; i < kCount; i += Shape::kThreads)
      if (kCount % Shape::kThreads == 0 || i + thread < kCount)
        at<float>(maxima_at(buffer) + (i + thread) * 4) = kSmallest;
  }

  /// One step of a maximum over lanes that differ in `bit`: a lane keeps half of its numbers and
  /// gives the other half away.
  template <int kHalf, int kCount>
  __device__ void halve(float (&top)[kCount], uint32_t bit) const {
    const bool upper = (lane() & bit) != 0;
#pragma unroll
    for (int c = 0; c < kHalf; ++c) {
      const float keep = upper ? top[c + kHalf] : top[c], give = upper ? top[c] : top[c + kHalf];
      top[c] = arch::max_nan(keep, __shfl_xor_sync(0xffffffffu, give, bit));
    }
  }

  /// Hands scales of this warp's keys to the warps that share them, from the largest magnitudes of
  /// each lane's four keys. Four lanes hold a key; each is left with one.
  __device__ void share_rows(uint32_t maxima, float (&top)[2 * kM], float unit) const {
    halve<2>(top, 2);
    halve<1>(top, 1);
    atomicMax(&at<uint32_t>(maxima + group() * 128 + lane() * 4), __float_as_uint(top[0] * unit));
  }
  /// P is not negative, so its order is that of its bits (NaN on top).
  __device__ void share_p_scales(uint32_t maxima, const Scores& x, float unit) const {
    float top[2 * kM];
#pragma unroll
    for (int i = 0; i < 2 * kM; ++i) {
      int most = 0;
#pragma unroll
      for (int n = 0; n < kQueryBlocks; ++n)
        most = __vimax3_s32(most, __float_as_int(x[i / 2][n][i % 2 * 2]),
                            __float_as_int(x[i / 2][n][i % 2 * 2 + 1]));
      top[i] = __int_as_float(most);
    }
    share_rows(maxima, top, unit);
  }
  __device__ void share_ds_scales(uint32_t maxima, const Scores& y) const {
    float top[2 * kM];
#pragma unroll
    for (int i = 0; i < 2 * kM; ++i) {
      const float(&v)[kQueryBlocks][4] = y[i / 2];
      top[i] = arch::max_nan(fabsf(v[0][i % 2 * 2]), fabsf(v[0][i % 2 * 2 + 1]));
#pragma unroll
      for (int n = 1; n < kQueryBlocks; ++n)
#pragma unroll
        for (int e = i % 2 * 2; e < i % 2 * 2 + 2; ++e)
          top[i] = arch::max_nan(top[i], fabsf(v[n][e]));
    }
    share_rows(maxima, top, 1.0f / numerics::kLevels);
  }
  /// The same for this warp's queries: eight lanes hold one.
  __device__ void share_query_scales(uint32_t maxima, const Scores& y) const {
    float top[2 * kQueryBlocks];
#pragma unroll
    for (int c = 0; c < 2 * kQueryBlocks; ++c) {
      const auto most = [&](int m) {
        return arch::max_nan(fabsf(y[m][c / 2][c % 2]), fabsf(y[m][c / 2][c % 2 + 2]));
      };
      top[c] = arch::max_nan(most(0), most(1));
    }
    halve<4>(top, 16);
    halve<2>(top, 8);
    halve<1>(top, 4);
    const uint32_t block = lane() / 16 % 2 * 2 + lane() / 8 % 2, column = 2 * t() + lane() / 4 % 2;
    atomicMax(&at<uint32_t>(maxima + (my_queries() + column * 4 + block) * 4),
              __float_as_uint(top[0] * (1.0f / numerics::kLevels)));
  }

  // `paper`: one scale for all of the tile.
  __device__ void reset_tile(int buffer) const {
    if (thread < 8) at<float>(this->tile_scales_at(buffer) + thread * 4) = kSmallest;
  }
  __device__ void share_tile_scales(uint32_t scales, const Scores& x, const Scores& y,
                                    float unit) const {
    int most = 0;
    float top = 0.0f;
#pragma unroll
    for (int m = 0; m < kM; ++m)
#pragma unroll
      for (int n = 0; n < kQueryBlocks; ++n)
#pragma unroll
        for (int e = 0; e < 4; e += 2) {
          most = __vimax3_s32(most, __float_as_int(x[m][n][e]), __float_as_int(x[m][n][e + 1]));
          top = arch::max_nan(top, arch::max_nan(fabsf(y[m][n][e]), fabsf(y[m][n][e + 1])));
        }
    most = static_cast<int>(__reduce_max_sync(0xffffffffu, static_cast<uint32_t>(most)));
    top = __uint_as_float(__reduce_max_sync(0xffffffffu, __float_as_uint(top)));
    if (lane() < 8)
      atomicMax(&at<uint32_t>(scales + lane() * 4),
                __float_as_uint(lane() < 4 ? __int_as_float(most) * unit
                                           : top * (1.0f / numerics::kLevels)));
  }
  /// A tile that holds NaN or Inf: its scales are those of what is finite, and keys and queries
  /// that are not have NaN instead of them. All threads come here.
  __device__ void part_poisoned(int buffer, const Scores& x, const Scores& y, float unit) const {
    const uint32_t maxima = maxima_at(buffer), scales = this->tile_scales_at(buffer);
    constexpr float kUnit = 1.0f / numerics::kLevels;
    __syncthreads();  // all have read the scales that are not finite
    this->reset_tile(buffer);
    __syncthreads();
    float top_p = 0.0f, top_ds = 0.0f;
    each(x, y, [&](float px, float dy, int, int, int) {
      top_p = fmaxf(top_p, px < INFINITY ? px : 0.0f);
      top_ds = fmaxf(top_ds, fabsf(dy) < INFINITY ? fabsf(dy) : 0.0f);
    });
    atomicMax(&at<uint32_t>(scales), __float_as_uint(top_p * unit));
    atomicMax(&at<uint32_t>(scales + 16), __float_as_uint(top_ds * kUnit));
    __syncthreads();
    static_assert(Shape::kTileK <= Shape::kThreads && Shape::kTileQ <= Shape::kThreads);
    const float ds = at<float>(scales + 16);
    if (thread < Shape::kTileK)
      at<float>(maxima + Lane::kP + thread * 4) = at<float>(scales),
                                             at<float>(maxima + Lane::kDs + thread * 4) = ds;
    if (thread < Shape::kTileQ) at<float>(maxima + Lane::kQuery + thread * 4) = ds;
    __syncthreads();
    constexpr uint32_t kNan = 0x7fffffff;
    // As row_at has them.
    const uint32_t keys = this->rows_of(maxima),
                   queries = maxima + Lane::kQuery + my_queries() * 4 + t() * 32;
    each(x, y, [&](float px, float dy, int row, int n, int e) {
      if (px - px != 0.0f) at<uint32_t>(keys + Lane::kP + row * 4) = kNan;
      if (dy - dy != 0.0f)
        at<uint32_t>(keys + Lane::kDs + row * 4) = at<uint32_t>(queries + e * 16 + n * 4) = kNan;
    });
    __syncthreads();
  }
  /// Calls `use` with P, dS, which of the lane's four keys, and which block and column of queries.
  template <class Use>
  __device__ static void each(const Scores& x, const Scores& y, Use use) {
#pragma unroll
    for (int m = 0; m < kM; ++m)
#pragma unroll
      for (int n = 0; n < kQueryBlocks; ++n)
#pragma unroll
        for (int e = 0; e < 4; ++e) use(x[m][n][e], y[m][n][e], 2 * m + e / 2, n, e % 2);
  }

  /// Reciprocals of scales: of this lane's keys, and of its queries [column of a pair][block].
  __device__ void row_inverses(Rows& x, uint32_t from) const {
    get_rows(x, from);
#pragma unroll
    for (int m = 0; m < kM; ++m)
#pragma unroll
      for (int r = 0; r < 2; ++r) x[m][r] = arch::reciprocal_approx(x[m][r]);
  }
  using Columns = float[2][4];
  __device__ void query_inverses(Columns& x, uint32_t maxima) const {
#pragma unroll
    for (int e = 0; e < 2; ++e) {
      const float4 v = at<float4>(maxima + my_queries() * 4 + t() * 32 + e * 16);
      x[e][0] = arch::reciprocal_approx(v.x), x[e][1] = arch::reciprocal_approx(v.y);
      x[e][2] = arch::reciprocal_approx(v.z), x[e][3] = arch::reciprocal_approx(v.w);
    }
  }
};

}  // namespace sagebwd::cuda::sm80
