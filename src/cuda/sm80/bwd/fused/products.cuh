// SPDX-License-Identifier: Apache-2.0
// What the fused backward makes of codes: dK and dV in registers, dQ in global memory.
#pragma once

#include <cstddef>

#include "cuda/arch/global_add.cuh"
#include "cuda/arch/mma_sync.cuh"
#include "cuda/sm80/bwd/fused/codes.cuh"
#include "cuda/sm80/bwd/fused/shared.cuh"
#include "cuda/sm80/params.h"
#include "cuda/tile/codes.cuh"
#include "cuda/tile/convert.cuh"
#include "cuda/tile/rotate.cuh"
#include "numerics/quantize.h"

namespace sagebwd::cuda::sm80::fused_backward {

/// This warp's sums: the keys of its key strip, and its share of their channels.
template <Config kConfig>
struct Accumulators {
  using Sums = float[kKeyBlocks][kConfig.channel_blocks()][4];
  Sums dk, dv;

  __device__ Accumulators() {
#pragma unroll
    for (int m = 0; m < kKeyBlocks; ++m) {
#pragma unroll
      for (int c = 0; c < kConfig.channel_blocks(); ++c)
#pragma unroll
        for (int e = 0; e < 4; ++e) dk[m][c][e] = dv[m][c][e] = 0.0f;
    }
  }
};

/// Where starts stay on (Config::starts_stay_on), this counts what they have added to dV and dK,
/// and takes it off again after kTilesWithStart tiles. The count is in one of two places, so that
/// it can come off while the next tiles are counted. `left` are the tiles from this one on, so the
/// last tiles are in place 0. A thread counts for one key, of P or of dS; behind a barrier all
/// lanes read what their keys have.
template <Config kConfig>
struct Starts {
  using Plan = SharedPlan<kConfig>;
  using Maxima = typename Plan::Maxima;
  static_assert(!kConfig.starts_stay_on || offsetof(Maxima, ds) == kConfig.tile_k() * 4);

  __device__ static void reset(const Thread<kConfig>& me) {
    if constexpr (kConfig.starts_stay_on)
      at<float>(place(me, 0) + me.index * 4) = at<float>(place(me, 1) + me.index * 4) = 0.0f;
  }
  /// When a tile begins, behind a barrier: takes off what the tiles of the other place have added.
  __device__ static void settle(Accumulators<kConfig>& sums, const Thread<kConfig>& me, int left) {
    if (kConfig.starts_stay_on && is_first_of_place(left)) take_off(sums, me, place_of(left) ^ 1);
  }
  /// When a tile ends. Its scales of P and dS lie at `maxima`.
  __device__ static void count(const Thread<kConfig>& me, uint32_t maxima, int left) {
    if constexpr (kConfig.starts_stay_on) {
      float& starts = at<float>(place(me, place_of(left)) + me.index * 4);
      starts = tile::count_start(at<float>(maxima + me.index * 4),
                                 is_first_of_place(left) ? 0.0f : starts);
    }
  }
  /// Behind the last tile.
  __device__ static void settle_last(Accumulators<kConfig>& sums, const Thread<kConfig>& me) {
    if constexpr (kConfig.starts_stay_on) {
      __syncthreads();
      take_off(sums, me, 0);
    }
  }

 private:
  __device__ static int place_of(int left) { return left / tile::kTilesWithStart & 1; }
  __device__ static bool is_first_of_place(int left) {
    return left % tile::kTilesWithStart == tile::kTilesWithStart - 1;
  }
  __device__ static uint32_t place(const Thread<kConfig>& me, int i) {
    return me.shared + static_cast<uint32_t>(offsetof(Plan, starts)) +
           static_cast<uint32_t>(i) * (sizeof(Plan::starts) / 2);
  }
  __device__ static void take_off(Accumulators<kConfig>& sums, const Thread<kConfig>& me, int i) {
    take_off(sums.dv, me, place(me, i) + offsetof(Maxima, p));
    take_off(sums.dk, me, place(me, i) + offsetof(Maxima, ds));
  }
  __device__ static void take_off(typename Accumulators<kConfig>::Sums& acc,
                                  const Thread<kConfig>& me, uint32_t from) {
    PerKey starts;
    get_four(starts, me.keys_of(from));
#pragma unroll
    for (int m = 0; m < kKeyBlocks; ++m)
#pragma unroll
      for (int c = 0; c < kConfig.channel_blocks(); ++c)
#pragma unroll
        for (int e = 0; e < 4; ++e) acc[m][c][e] -= starts[m][e >> 1];
  }
};

/// acc + scale·sum.
template <Config kConfig>
__device__ float add_scaled(int sum, float scale, float acc) {
  return kConfig.starts_stay_on ? tile::add_with_start(sum, scale, acc)
                                : fmaf(tile::sum_of(sum), scale, acc);
}

/// acc += scale·codes·B, where B lies transposed in shared memory and `b` is the lane's part of it.
/// Two blocks of channels at a time, in the compiler's own order.
template <tile::Bytes kA, Config kConfig>
__device__ void multiply_in_pairs(typename Accumulators<kConfig>::Sums& acc,
                                  const uint32_t (&a)[kKeyBlocks][kConfig.query_strips][4],
                                  const PerKey& scale, uint32_t b) {
#pragma unroll
  for (int c = 0; c < kConfig.channel_blocks(); c += 2) {
    int sum[2][kKeyBlocks][4];
#pragma unroll
    for (int k = 0; k < kConfig.query_strips; k += 2) {
      uint32_t f[2][4];
      arch::ldmatrix_x4(f[0], b + (k / 2 * kConfig.d + c * 8) * kSlab);
      arch::ldmatrix_x4(f[1], b + (k / 2 * kConfig.d + c * 8 + 8) * kSlab);
#pragma unroll
      for (int step = 0; step < 2; ++step)
#pragma unroll
        for (int h = 0; h < 2; ++h)
#pragma unroll
          for (int m = 0; m < kKeyBlocks; ++m)
            k + step == 0
                ? tile::start_sum<kA>(sum[h][m], a[m][0], f[h][0], f[h][1])
                : arch::mma_8<kA>(sum[h][m], a[m][k + step], f[h][2 * step], f[h][2 * step + 1]);
    }
#pragma unroll
    for (int h = 0; h < 2; ++h)
#pragma unroll
      for (int m = 0; m < kKeyBlocks; ++m)
#pragma unroll
        for (int e = 0; e < 4; ++e)
          acc[m][c + h][e] = add_scaled<kConfig>(sum[h][m][e], scale[m][e >> 1], acc[m][c + h][e]);
  }
}

/// The same with three blocks of channels in flight: the operand of the next one, the products of
/// this one, and the sums of the last on their way to FP32. The fences keep the compiler from
/// undoing that.
template <tile::Bytes kA, Config kConfig>
__device__ void multiply_in_flight(typename Accumulators<kConfig>::Sums& acc,
                                   const uint32_t (&a)[kKeyBlocks][kConfig.query_strips][4],
                                   const PerKey& scale, uint32_t b) {
  constexpr int D = kConfig.d, kSteps = kConfig.query_strips, kBlocks = kConfig.channel_blocks();
  uint32_t f[2][kSteps / 2][4];
  int sum[2][kKeyBlocks][4];
#pragma unroll
  for (int k = 0; k < kSteps / 2; ++k) arch::ldmatrix_x4(f[0][k], b + k * D * kSlab);
#pragma unroll
  for (int c = 0; c <= kBlocks; ++c) {
    __syncwarp();
    if (c + 1 < kBlocks)
#pragma unroll
      for (int k = 0; k < kSteps / 2; ++k)
        arch::ldmatrix_x4(f[(c + 1) & 1][k], b + (k * D + (c + 1) * 8) * kSlab);
    if (c < kBlocks)
#pragma unroll
      for (int k = 0; k < kSteps; ++k)
#pragma unroll
        for (int m = 0; m < kKeyBlocks; ++m) {
          const uint32_t(&g)[4] = f[c & 1][k / 2];
          k == 0 ? tile::start_sum<kA>(sum[c & 1][m], a[m][0], g[0], g[1])
                 : arch::mma_8<kA>(sum[c & 1][m], a[m][k], g[k % 2 * 2], g[k % 2 * 2 + 1]);
        }
    if (c > 0)
#pragma unroll
      for (int m = 0; m < kKeyBlocks; ++m)
#pragma unroll
        for (int e = 0; e < 4; ++e)
          acc[m][c - 1][e] =
              add_scaled<kConfig>(sum[(c - 1) & 1][m][e], scale[m][e >> 1], acc[m][c - 1][e]);
  }
}

/// acc += scale·codes·B for this warp's keys and channels and all queries of the tile. `codes` and
/// B (`transposed`) are offsets of SharedPlan; `mine` are this warp's codes, `scales` the address
/// of the lane's four scales.
template <tile::Bytes kA, Config kConfig>
__device__ void multiply(typename Accumulators<kConfig>::Sums& acc, const Thread<kConfig>& me,
                         uint32_t codes, const KeyCodes& mine, uint32_t scales,
                         uint32_t transposed) {
  constexpr int kSteps = kConfig.query_strips;
  PerKey scale;
  get_four(scale, scales);
  uint32_t a[kKeyBlocks][kSteps][4];
#pragma unroll
  for (int m = 0; m < kKeyBlocks; ++m)
    if constexpr (kConfig.keeps_codes) {  // this warp's contraction step comes first
#pragma unroll
      for (int i = 0; i < 4; ++i) a[m][0][i] = mine[m][i / 2][i % 2];
      me.get_codes(a[m][1], me.codes_at(codes, me.query_strip() ^ 1, m));
    } else {
#pragma unroll
      for (int k = 0; k < kSteps; ++k) me.get_codes(a[m][k], me.codes_at(codes, k, m));
    }
  const uint32_t b =
      me.shared + transposed + me.query_strip() * kConfig.channels() * kSlab +
      (kConfig.keeps_codes ? me.transposed ^ (me.query_strip() * 32) : me.transposed);
  if constexpr (kConfig.d == 64)
    multiply_in_pairs<kA, kConfig>(acc, a, scale, b);
  else
    multiply_in_flight<kA, kConfig>(acc, a, scale, b);
}

/// dV += P8ᵀ·dO8; `do8t` is the offset of the tile's dO8.
template <Config kConfig>
__device__ void add_to_dv(Accumulators<kConfig>& sums, const Thread<kConfig>& me,
                          const TileCodes& codes, uint32_t scales, uint32_t do8t) {
  multiply<tile::Bytes::u8>(sums.dv, me, me.kPCodes, codes.p, scales, do8t);
}
/// dK += dS8ᵀ·Q8.
template <Config kConfig>
__device__ void add_to_dk(Accumulators<kConfig>& sums, const Thread<kConfig>& me,
                          const TileCodes& codes, uint32_t scales, uint32_t q8t) {
  multiply<tile::Bytes::s8>(sums.dk, me, me.kDsCodes, codes.ds, scales, q8t);
}

/// dQ·(logit factor) += dS8·K8 in global memory, for this warp's query strip and its share of the
/// channels. `row` is the tile's first in the workspace.
template <Config kConfig>
__device__ void add_to_dq(uint32_t row, const Thread<kConfig>& me, const uint32_t (&mine)[2][4],
                          uint32_t scales) {
  constexpr int D = kConfig.d, kDqBlocks = kConfig.dq_blocks();
  constexpr int kBlocks = kDqBlocks < 4 ? kDqBlocks : 4;
  const uint32_t strip = me.query_strip(), first = me.warp() / kConfig.query_strips * kDqBlocks;
  const float4 four = at<float4>(scales);
  float scale[2][2] = {{four.x, four.y}, {four.z, four.w}}, offset[2][2];
  if constexpr (kConfig.has_dq_keys() && !kCode<kConfig>.shares_dq_scales) {
    const float k_scale = me.dq_key_scale();
#pragma unroll
    for (int j = 0; j < 2; ++j) scale[j][0] *= k_scale, scale[j][1] *= k_scale;
  }
#pragma unroll
  for (int j = 0; j < 2; ++j)
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      // 22 significant bits, so that the offset is exact.
      scale[j][r] = __uint_as_float(__float_as_uint(scale[j][r]) & 0xfffffffcu);
      offset[j][r] = -tile::kMagicFloat * scale[j][r];
    }
  // This warp's contraction step comes first.
  const uint32_t step0 = kConfig.keeps_codes ? me.key_strip() : 0;
  const uint32_t k8t = me.shared + offsetof(SharedPlan<kConfig>, k8t) + first * 8 * kSlab +
                       (kConfig.keeps_codes ? me.transposed ^ step0 * 32 : me.transposed);
  float* out = me.p.dq_sum + static_cast<uint64_t>(row) * D + (strip * 32 * D + first * 128);
#pragma unroll
  for (int part = 0; part < kDqBlocks; part += kBlocks) {
    int sum[2][kBlocks][4];
#pragma unroll
    for (int k = 0; k < kConfig.key_strips; k += 2) {
      uint32_t a[2][2][4];
#pragma unroll
      for (int j = 0; j < 2; ++j) {
        if constexpr (kConfig.keeps_codes)
#pragma unroll
          for (int i = 0; i < 4; ++i) a[j][0][i] = mine[j][i];
        else
          me.get_codes(a[j][0], me.query_codes_at(strip, j, k));
        me.get_codes(a[j][1], me.query_codes_at(strip, j, (k + 1) ^ step0));
      }
      uint32_t f[kBlocks][4];
#pragma unroll
      for (int c = 0; c < kBlocks; ++c)
        arch::ldmatrix_x4(f[c], k8t + (k / 2 * D + (part + c) * 8) * kSlab);
#pragma unroll
      for (int step = 0; step < 2; ++step)
#pragma unroll
        for (int c = 0; c < kBlocks; ++c)
#pragma unroll
          for (int j = 0; j < 2; ++j)
            k + step == 0 ? tile::start_sum(sum[j][c], a[j][0], f[c][0], f[c][1])
                          : arch::mma_8(sum[j][c], a[j][step], f[c][2 * step], f[c][2 * step + 1]);
    }
#pragma unroll
    for (int j = 0; j < 2; ++j)
#pragma unroll
      for (int c = 0; c < kBlocks; ++c) {
        const int(&v)[4] = sum[j][c];
        arch::global_add(out + j * 16 * D + (part + c) * 128, me.lane(),
                         tile::scaled_sum(v[0], scale[j][0], offset[j][0]),
                         tile::scaled_sum(v[1], scale[j][0], offset[j][0]),
                         tile::scaled_sum(v[2], scale[j][1], offset[j][1]),
                         tile::scaled_sum(v[3], scale[j][1], offset[j][1]));
      }
  }
}

/// The channel of a lane's first element of a block.
template <Config kConfig>
__device__ int channel_of(const Thread<kConfig>& me, int block) {
  return static_cast<int>(me.query_strip() * kConfig.channels() + 2 * me.t()) + block * 8;
}

/// Writes the sums of a piece of a cut list. piece_sums.cu adds the pieces up and does the rest.
template <Config kConfig>
__device__ void store_cut(const Accumulators<kConfig>& sums, const Thread<kConfig>& me) {
  constexpr int D = kConfig.d, kTileK = kConfig.tile_k(), kStrips = kConfig.query_strips;
  // From the special register, so that the loop before need not hold what follows from the index.
  const uint32_t index = arch::thread_index(), lane = index % 32, warp = index / 32;
  const uint32_t first_key = warp / kStrips * kWarpKeys + lane / 4,
                 first_channel = warp % kStrips * kConfig.channels() + 2 * (lane % 4);
  float* const dk = me.p.lists.sums + int64_t{2} * me.walk().cut() * (kTileK * D) +
                    (first_key * D + first_channel);
#pragma unroll
  for (int m = 0; m < kKeyBlocks; ++m)
#pragma unroll
    for (int r = 0; r < 2; ++r)
#pragma unroll
      for (int c = 0; c < kConfig.channel_blocks(); ++c) {
        float* const to = dk + (16 * m + 8 * r) * D + c * 8;
        *reinterpret_cast<float2*>(to) = float2{sums.dk[m][c][2 * r], sums.dk[m][c][2 * r + 1]};
        *reinterpret_cast<float2*>(to + kTileK * D) =
            float2{sums.dv[m][c][2 * r], sums.dv[m][c][2 * r + 1]};
      }
}

template <typename T, Config kConfig>
__device__ void store_dv(const Accumulators<kConfig>& sums, const Thread<kConfig>& me) {
  const tile::Sequence& s = me.walk().s;
#pragma unroll
  for (int m = 0; m < kKeyBlocks; ++m)
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const int key = me.walk().key0 + me.key(m, r);
      if (key >= s.nk) continue;
      T* row = tile::row_of<T>(me.p.dv, s, me.walk().kv_head, s.k_begin + key);
#pragma unroll
      for (int c = 0; c < kConfig.channel_blocks(); ++c) {
        const int channel = channel_of(me, c);
        if (channel >= me.p.d) break;
        tile::store_pair(row + channel, sums.dv[m][c][2 * r], sums.dv[m][c][2 * r + 1],
                         me.p.dv.vector);
      }
    }
}

/// The steps of the rotation between the blocks of channels that a warp owns.
template <Config kConfig>
__device__ void turn_back_blocks(typename Accumulators<kConfig>::Sums& x, int size) {
  constexpr int kBlocks = kConfig.channel_blocks();
#pragma unroll
  for (int h = 1; h < kBlocks; h *= 2) {
    if (8 * h >= size) break;
#pragma unroll
    for (int m = 0; m < kKeyBlocks; ++m)
#pragma unroll
      for (int c = 0; c < kBlocks; ++c)
#pragma unroll
        for (int e = 0; e < 4; ++e)
          if ((c & h) == 0) tile::butterfly(x[m][c][e], x[m][c + h][e]);
  }
}

/// Writes dK by way of shared memory, and turns the rotation back: on this side of it a thread has
/// all blocks of a warp's channels, on the other side all channels of a block. Only the steps
/// between warps are between lanes; in `paper` those between blocks are too.
template <typename T, Config kConfig>
__device__ void store_dk(Accumulators<kConfig>& sums, const Thread<kConfig>& me) {
  constexpr float kLn2 = static_cast<float>(numerics::kLn2);  // the logit factor carries c·log2e
  constexpr int D = kConfig.d, kTileK = kConfig.tile_k(), kStrips = kConfig.query_strips,
                kStride = D + 8;  // spreads over banks
  static_assert(offsetof(SharedPlan<kConfig>, k_scale) >= kTileK * kStride * sizeof(float));
  constexpr bool kBlocksFirst = !kConfig.paper();  // `paper` has no registers
  PerKey scale;
  if constexpr (kConfig.paper()) me.get_key_scales(scale);
  __syncthreads();  // the loop has read all that lies there
  const int size = me.p.rotation;
  float unit = kLn2;
  if (size > 0) {
    unit *= numerics::rotation_unit(size);
    if constexpr (kBlocksFirst) turn_back_blocks<kConfig>(sums.dk, size);
  }
  // From the special register, so that the loop above need not hold what follows from the index.
  const uint32_t index = arch::thread_index(), lane = index % 32, warp = index / 32;
  const uint32_t first_key = warp / kStrips * kWarpKeys + lane / 4,
                 first_channel = warp % kStrips * kConfig.channels() + 2 * (lane % 4);
  const uint32_t to = me.shared + (first_key * kStride + first_channel) * 4;
#pragma unroll
  for (int m = 0; m < kKeyBlocks; ++m)
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const float factor = kConfig.paper() ? unit / scale[m][r] : unit;
#pragma unroll
      for (int c = 0; c < kConfig.channel_blocks(); ++c)
        at<float2>(to + ((16 * m + 8 * r) * kStride + c * 8) * 4) =
            float2{sums.dk[m][c][2 * r] * factor, sums.dk[m][c][2 * r + 1] * factor};
    }
  __syncthreads();
  const tile::Sequence& s = me.walk().s;
  const int key0 = me.walk().key0;
  constexpr int kLanes = D / 8;  // of a row
  const uint32_t channel = index % kLanes * 8;
#pragma unroll 1
  for (int row = static_cast<int>(index / kLanes); row < kTileK;
       row += kConfig.threads() / kLanes) {
    float x[8];
    const uint32_t from = me.shared + (row * kStride + channel) * 4;
    const float4 a = at<float4>(from), b = at<float4>(from + 16);
    x[0] = a.x, x[1] = a.y, x[2] = a.z, x[3] = a.w, x[4] = b.x, x[5] = b.y, x[6] = b.z, x[7] = b.w;
    if (size > 0) {
      tile::hadamard_inside(x);
#pragma unroll kBlocksFirst ? 4 : 1
      for (int h = kBlocksFirst ? kConfig.channels() : 8; h < D; h *= 2)
        if (h < size) tile::hadamard_across(x, h / 8, (channel & static_cast<uint32_t>(h)) != 0);
      tile::flip_signs(x, channel);
    }
    if (key0 + row >= s.nk || static_cast<int>(channel) >= me.p.d) continue;
    T* out = tile::row_of<T>(me.p.dk, s, me.walk().kv_head, s.k_begin + key0 + row) + channel;
    tile::store_eight(out, x, me.p.dk.vector);
  }
}

}  // namespace sagebwd::cuda::sm80::fused_backward
