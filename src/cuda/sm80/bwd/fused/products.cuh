// SPDX-License-Identifier: Apache-2.0
// What the fused backward makes of codes: dK and dV in registers, dQ in global memory.
#pragma once

#include <cstddef>

#include "cuda/arch/global_add.cuh"
#include "cuda/arch/mma_sync.cuh"
#include "cuda/sm80/bwd/fused/codes.cuh"
#include "cuda/sm80/params.h"
#include "cuda/tile/codes.cuh"
#include "cuda/tile/convert.cuh"
#include "cuda/tile/shared_tile.cuh"
#include "numerics/quantize.h"

namespace sagebwd::cuda::sm80 {

template <typename T, class Shape>
struct FusedProducts : FusedCodes<T, Shape> {
  using Lane = FusedCodes<T, Shape>;
  using Lane::base, Lane::thread, Lane::warp, Lane::lane, Lane::t, Lane::group, Lane::member,
      Lane::my_row, Lane::key_scales, Lane::operand_at, Lane::query_codes_at, Lane::get_codes,
      Lane::work;
  using typename Lane::Rows, typename Lane::Shared, typename Lane::Codes, typename Lane::QueryCodes;
  static constexpr int D = Shape::D, kM = Shape::kM;
  static constexpr int kTileQ = Shape::kTileQ, kTileK = Shape::kTileK, kThreads = Shape::kThreads;
  static constexpr int kChannels = Shape::kChannels, kChannelBlocks = Shape::kChannelBlocks;
  static constexpr bool kWithStart = kFusedChoices<Shape>.with_start;
  static constexpr bool kKeepsCodes = kFusedChoices<Shape>.keeps_codes;

  const BackwardParams& p;
  uint32_t b_t;  // the lane's part of fragment addresses of transposed operands
  float dk[kM][kChannelBlocks][4], dv[kM][kChannelBlocks][4];

  __device__ FusedProducts(const BackwardParams& params, uint8_t* shared)
      : Lane(shared), p(params) {
    b_t = tile::swizzled<kGroup>(lane() & 7, lane() >> 3);
#pragma unroll
    for (int m = 0; m < kM; ++m) {
#pragma unroll
      for (int c = 0; c < kChannelBlocks; ++c)
#pragma unroll
        for (int e = 0; e < 4; ++e) dk[m][c][e] = dv[m][c][e] = 0.0f;
    }
    if constexpr (kWithStart)
      at<float>(starts_at(0) + thread * 4) = at<float>(starts_at(1) + thread * 4) = 0.0f;
  }
  template <typename V>
  __device__ V& at(uint32_t address) const {
    return Lane::template at<V>(address);
  }

  // What has to come off dV and dK again (tile/codes.cuh) is counted for kTilesWithStart tiles at a
  // time, in one of two places. `left` are the tiles from this one on, so the last are in place 0.
  // A thread counts for one key, of P or of dS; behind a barrier all lanes read what their keys
  // have.
  static_assert(!kWithStart ||
                (2 * kTileK == kThreads && offsetof(typename Shared::Maxima, ds) == kTileK * 4));
  __device__ static int place_of(int left) { return left / tile::kTilesWithStart & 1; }
  __device__ static bool is_first_of_place(int left) {
    return left % tile::kTilesWithStart == tile::kTilesWithStart - 1;
  }
  __device__ uint32_t starts_at(int place) const {
    return base + static_cast<uint32_t>(offsetof(Shared, starts)) +
           static_cast<uint32_t>(place) * sizeof(Shared::starts[0]);
  }
  __device__ void count_starts(uint32_t maxima, int left) const {
    float& starts = at<float>(starts_at(place_of(left)) + thread * 4);
    starts =
        tile::count_start(at<float>(maxima + thread * 4), is_first_of_place(left) ? 0.0f : starts);
  }
  __device__ void take_starts_off(int place) {
    take_off(dv, starts_at(place) + Lane::kP), take_off(dk, starts_at(place) + Lane::kDs);
  }
  __device__ void take_off(float (&acc)[kM][kChannelBlocks][4], uint32_t from) const {
    Rows starts;
    this->get_rows(starts, from);
#pragma unroll
    for (int m = 0; m < kM; ++m)
#pragma unroll
      for (int c = 0; c < kChannelBlocks; ++c)
#pragma unroll
        for (int e = 0; e < 4; ++e) acc[m][c][e] -= starts[m][e >> 1];
  }

  __device__ static float add(int sum, float scale, float acc) {
    return kWithStart ? tile::add_with_start(sum, scale, acc) : fmaf(tile::sum_of(sum), scale, acc);
  }
  /// acc += scale·codes·B, but for the start of the sums if that stays on; B transposed in shared
  /// memory. `mine` are this warp's codes.
  template <tile::Bytes kA>
  __device__ void multiply(float (&acc)[kM][kChannelBlocks][4], uint32_t codes, const Codes& mine,
                           const Rows& scale, uint32_t transposed) const {
    constexpr int kAll = kTileQ / 32;
    static_assert(!kKeepsCodes || kAll == 2);
    uint32_t a[kM][kAll][4];
#pragma unroll
    for (int m = 0; m < kM; ++m)
      if constexpr (kKeepsCodes) {  // this warp's contraction step comes first
#pragma unroll
        for (int i = 0; i < 4; ++i) a[m][0][i] = mine[m][i / 2][i % 2];
        get_codes(a[m][1], operand_at(codes, member() ^ 1, m));
      } else {
#pragma unroll
        for (int k = 0; k < kAll; ++k) get_codes(a[m][k], operand_at(codes, k, m));
      }
    const uint32_t b = base + transposed + member() * kChannels * kGroup +
                       (kKeepsCodes ? b_t ^ (member() * 32) : b_t);
    if constexpr (D == 64) {  // two blocks of channels at a time, and the compiler's own order
#pragma unroll
      for (int c = 0; c < kChannelBlocks; c += 2) {
        int sum[2][kM][4];
#pragma unroll
        for (int k = 0; k < kAll; k += 2) {
          uint32_t f[2][4];
          arch::ldmatrix_x4(f[0], b + (k / 2 * D + c * 8) * kGroup);
          arch::ldmatrix_x4(f[1], b + (k / 2 * D + c * 8 + 8) * kGroup);
#pragma unroll
          for (int step = 0; step < 2; ++step)
#pragma unroll
            for (int h = 0; h < 2; ++h)
#pragma unroll
              for (int m = 0; m < kM; ++m)
                k + step == 0 ? tile::start_sum<kA>(sum[h][m], a[m][0], f[h][0], f[h][1])
                              : arch::mma_8<kA>(sum[h][m], a[m][k + step], f[h][2 * step],
                                                f[h][2 * step + 1]);
        }
#pragma unroll
        for (int h = 0; h < 2; ++h)
#pragma unroll
          for (int m = 0; m < kM; ++m)
#pragma unroll
            for (int e = 0; e < 4; ++e)
              acc[m][c + h][e] = add(sum[h][m][e], scale[m][e >> 1], acc[m][c + h][e]);
      }
    } else {
      // In flight: the operand of the next block of channels, the products of this one, and the
      // sums of the last on their way to FP32. The fences keep the compiler from undoing that.
      uint32_t f[2][kAll / 2][4];
      int sum[2][kM][4];
#pragma unroll
      for (int k = 0; k < kAll / 2; ++k) arch::ldmatrix_x4(f[0][k], b + k * D * kGroup);
#pragma unroll
      for (int c = 0; c <= kChannelBlocks; ++c) {
        __syncwarp();
        if (c + 1 < kChannelBlocks)
#pragma unroll
          for (int k = 0; k < kAll / 2; ++k)
            arch::ldmatrix_x4(f[(c + 1) & 1][k], b + (k * D + (c + 1) * 8) * kGroup);
        if (c < kChannelBlocks)
#pragma unroll
          for (int k = 0; k < kAll; ++k)
#pragma unroll
            for (int m = 0; m < kM; ++m) {
              const uint32_t(&g)[4] = f[c & 1][k / 2];
              k == 0 ? tile::start_sum<kA>(sum[c & 1][m], a[m][0], g[0], g[1])
                     : arch::mma_8<kA>(sum[c & 1][m], a[m][k], g[k % 2 * 2], g[k % 2 * 2 + 1]);
            }
        if (c > 0)
#pragma unroll
          for (int m = 0; m < kM; ++m)
#pragma unroll
            for (int e = 0; e < 4; ++e)
              acc[m][c - 1][e] = add(sum[(c - 1) & 1][m][e], scale[m][e >> 1], acc[m][c - 1][e]);
      }
    }
  }

  /// Where the scales of this lane's queries are that add_queries takes.
  __device__ uint32_t query_rows_of(uint32_t from) const {
    return from + warp() % Shape::kDqPairs * 128 + lane() / 4 * 16;
  }
  /// dQ·lane += codes·K8 of 32 queries and this warp's share of the channels; `row` is the tile's
  /// first in the workspace. `mine` are this warp's codes.
  __device__ void add_queries(uint32_t row, uint32_t scales, const QueryCodes& mine) const {
    const uint32_t pair = warp() % Shape::kDqPairs,
                   first = warp() / Shape::kDqPairs * Shape::kDqBlocks;
    constexpr int kBlocks = Shape::kDqBlocks < 4 ? Shape::kDqBlocks : 4;
    const float4 four = at<float4>(scales);
    float scale[2][2] = {{four.x, four.y}, {four.z, four.w}}, offset[2][2];
#pragma unroll
    for (int j = 0; j < 2; ++j)
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        // 22 significant bits, so that the offset is exact.
        scale[j][r] = __uint_as_float(__float_as_uint(scale[j][r]) & 0xfffffffcu);
        offset[j][r] = -tile::kMagicFloat * scale[j][r];
      }
    // This warp's contraction step comes first.
    static_assert(!kKeepsCodes || (kTileK == 64 && Shape::kDqPairs == Shape::kShare));
    const uint32_t step0 = kKeepsCodes ? group() : 0;
    const uint32_t k8t =
        base + offsetof(Shared, k8t) + first * 8 * kGroup + (kKeepsCodes ? b_t ^ step0 * 32 : b_t);
    float* out = p.dq_sum + static_cast<uint64_t>(row) * D + (pair * 32 * D + first * 128);
#pragma unroll
    for (int part = 0; part < Shape::kDqBlocks; part += kBlocks) {
      int sum[2][kBlocks][4];
#pragma unroll
      for (int k = 0; k < kTileK / 32; k += 2) {
        uint32_t a[2][2][4];
#pragma unroll
        for (int j = 0; j < 2; ++j) {
          if constexpr (kKeepsCodes)
#pragma unroll
            for (int i = 0; i < 4; ++i) a[j][0][i] = mine[j][i];
          else
            get_codes(a[j][0], query_codes_at(pair, j, k));
          get_codes(a[j][1], query_codes_at(pair, j, (k + 1) ^ step0));
        }
        uint32_t f[kBlocks][4];
#pragma unroll
        for (int c = 0; c < kBlocks; ++c)
          arch::ldmatrix_x4(f[c], k8t + (k / 2 * D + (part + c) * 8) * kGroup);
#pragma unroll
        for (int step = 0; step < 2; ++step)
#pragma unroll
          for (int c = 0; c < kBlocks; ++c)
#pragma unroll
            for (int j = 0; j < 2; ++j)
              k + step == 0
                  ? tile::start_sum(sum[j][c], a[j][0], f[c][0], f[c][1])
                  : arch::mma_8(sum[j][c], a[j][step], f[c][2 * step], f[c][2 * step + 1]);
      }
#pragma unroll
      for (int j = 0; j < 2; ++j)
#pragma unroll
        for (int c = 0; c < kBlocks; ++c) {
          const int(&v)[4] = sum[j][c];
          arch::global_add(out + j * 16 * D + (part + c) * 128, lane(),
                           tile::scaled_sum(v[0], scale[j][0], offset[j][0]),
                           tile::scaled_sum(v[1], scale[j][0], offset[j][0]),
                           tile::scaled_sum(v[2], scale[j][1], offset[j][1]),
                           tile::scaled_sum(v[3], scale[j][1], offset[j][1]));
        }
    }
  }

  /// Writes dK and dV.
  __device__ void finish() const {
    constexpr float kLn2 = static_cast<float>(numerics::kLn2);  // Q's folded scale carries c·log2e
    Rows scale;
    key_scales(scale);
    const tile::Sequence& s = work().s;
    const int key0 = work().key0, kv_head = work().kv_head;
#pragma unroll
    for (int m = 0; m < kM; ++m)
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        const int key = key0 + my_row(m, r);
        if (key >= s.nk) continue;
        const float factor = kLn2 / scale[m][r];
        T* dk_row = tile::row_of<T>(p.dk, s, kv_head, s.k_begin + key);
        T* dv_row = tile::row_of<T>(p.dv, s, kv_head, s.k_begin + key);
#pragma unroll
        for (int c = 0; c < kChannelBlocks; ++c) {
          const int at = static_cast<int>(member() * kChannels + 2 * t()) + c * 8;
          if (at >= p.d) break;
          tile::store_pair(dk_row + at, dk[m][c][2 * r] * factor, dk[m][c][2 * r + 1] * factor,
                           p.dk.vector);
          tile::store_pair(dv_row + at, dv[m][c][2 * r], dv[m][c][2 * r + 1], p.dv.vector);
        }
      }
  }
};

}  // namespace sagebwd::cuda::sm80
