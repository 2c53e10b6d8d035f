// SPDX-License-Identifier: Apache-2.0
// dQ: one thread block per 32·kPairs queries of a head, looping over tiles of kTileK keys.
//
//   kPairs pairs,    ┌────┬────┐   S = Q8·K8ᵀ (INT8)   dP = dO·Vᵀ (16 bit)   dS = P∘(dP - D)
//   32 queries  →    │ m0 │ m1 │   dQ += dS8·K8 (INT8), dS8 with K's token scale folded in
//   each             └────┴────┘
//
// It computes S and dP a second time, and spends two products on not exchanging dS between all
// warps and not adding dQ up in memory: every pair owns its rows, so there are no atomics and the
// result is bit-equal from run to run. The members of a pair compute half of the keys each,
// exchange row maxima and codes, and own half of the channels of dQ each (tile/warp_pair.cuh).
// `vectorwise` has one scale per query and tile, `paper` one per tile of 128 x 64.
#pragma once

#include "cuda/arch/mma_sync.cuh"
#include "cuda/arch/target.cuh"
#include "cuda/host/launch.h"
#include "cuda/host/target.h"
#include "cuda/sm80/bwd/launch.h"
#include "cuda/tile/codes.cuh"
#include "cuda/tile/convert.cuh"
#include "cuda/tile/dither.cuh"
#include "cuda/tile/sequence.cuh"
#include "cuda/tile/shared_tile.cuh"
#include "cuda/tile/warp_pair.cuh"
#include "numerics/quantize.h"
#include "sagebwd/recipe.h"

namespace sagebwd::cuda::sm80 {

template <int D, int kTileK, int kPairs, int kStages>
struct QueryBlockShared {
  static constexpr int kCodeGroups = tile::kRowBlocks * kTileK / 64;
  struct Stage {
    alignas(128) uint8_t k8[kTileK * D];
    alignas(128) uint8_t k8t[kTileK * D];
    alignas(128) uint8_t v16[kTileK * D * 2];
    alignas(16) KeyScale k_scale[kTileK];
  };
  alignas(128) uint8_t q8[tile::kPairRows * kPairs * D];
  alignas(128) uint8_t do16[tile::kPairRows * kPairs * D * 2];
  Stage stage[kStages];
  tile::PairSpace<kPairs, kCodeGroups, 1> pairs;
  float warp_max[kPairs];
};

template <typename T, int D, int kTileK, int kPairs, bool kPaper, Rounding kRounding, int kStages>
struct QueryBlock {
  using Shared = QueryBlockShared<D, kTileK, kPairs, kStages>;
  static constexpr int kThreads = 64 * kPairs;
  static constexpr int kRows = tile::kPairRows * kPairs;
  static_assert(!kPaper || (kRows == 128 && kTileK == 64), "a scale of `paper` covers one tile");
  static constexpr int kM = tile::kRowBlocks;
  static constexpr int kMyKeys = kTileK / 2;
  static constexpr int kKeyBlocks = kMyKeys / 8;
  static constexpr int kSteps = kMyKeys / 32;
  static constexpr int kChannels = D / 2;
  static constexpr int kChannelBlocks = kChannels / 8;
  using Scores = float[kM][kKeyBlocks][4];
  using RowValues = tile::RowValues;

  const BackwardParams& p;
  Shared& shared;
  tile::Sequence s;
  tile::WarpPair<kPairs, Shared::kCodeGroups, 1> pair;
  int head, kv_head;
  uint32_t thread, lane, t;
  int row0;  // query of this thread's first row, inside the sequence
  tile::Band band;
  RowValues q_lane, lse2, delta, row_sum;
  float dq[kM][kChannelBlocks][4];
  // Of the dither.
  tile::Uniforms<1> uniforms;
  RowValues query_term;

  __device__ QueryBlock(const BackwardParams& params, Shared& sh, int block)
      : p(params),
        shared(sh),
        s(tile::sequence_of_block(params.seq, block * kRows / kBlock, true)),
        pair(sh.pairs) {
    head = static_cast<int>(blockIdx.y);
    kv_head = head / p.group;
    thread = threadIdx.x, lane = thread % 32, t = lane % 4;
    const int64_t padded = static_cast<int64_t>(block) * kRows, first = head * p.tq + padded;
    const int mine = static_cast<int>(pair.pair * tile::kPairRows + lane / 4);
    row0 = static_cast<int>(padded - s.q_pad) + mine;
    band = tile::band_of(p.mask, s);
#pragma unroll
    for (int m = 0; m < kM; ++m) {
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        const QueryRow q = p.q_row[first + mine + 16 * m + 8 * r];
        q_lane[m][r] = q.lane, lse2[m][r] = q.lse2, delta[m][r] = q.delta;
        row_sum[m][r] = 0.0f;
        if constexpr (kRounding == Rounding::dither)
          query_term[m][r] = tile::query_term(static_cast<uint32_t>(mine + 16 * m + 8 * r));
      }
#pragma unroll
      for (int c = 0; c < kChannelBlocks; ++c)
#pragma unroll
        for (int e = 0; e < 4; ++e) dq[m][c][e] = 0.0f;
    }
    tile::load_tile<kRows, D, kThreads>(arch::shared_address(shared.q8), p.q8 + first * D, thread);
    tile::load_tile<kRows, 2 * D, kThreads>(arch::shared_address(shared.do16),
                                            static_cast<const T*>(p.do16) + first * D, thread);
    arch::cp_async_commit();
  }

  __device__ int row(int m, int r) const { return row0 + 16 * m + 8 * r; }

  __device__ void load(int stage, int tile) {
    auto& st = shared.stage[stage];
    const int64_t key = kv_head * p.tk + s.k_pad + static_cast<int64_t>(tile) * kTileK;
    tile::load_tile<kTileK, D, kThreads>(arch::shared_address(st.k8), p.k8 + key * D, thread);
#pragma unroll
    for (int n = 0; n < kTileK / kGroup; ++n)
      tile::load_tile<D, kGroup, kThreads>(arch::shared_address(st.k8t) + n * D * kGroup,
                                           p.k8t + (key + n * kGroup) * D, thread);
    tile::load_tile<kTileK, 2 * D, kThreads>(arch::shared_address(st.v16),
                                             static_cast<const T*>(p.v16) + key * D, thread);
    tile::load_linear<kTileK * 8, kThreads>(arch::shared_address(st.k_scale), p.k_scale + key,
                                            thread);
  }

  __device__ void probabilities(Scores& x, int stage) const {
    const uint32_t k8 = arch::shared_address(shared.stage[stage].k8) + pair.member * kMyKeys * D;
    const uint32_t q8 = arch::shared_address(shared.q8) + pair.pair * tile::kPairRows * D;
    const KeyScale* k_scale = shared.stage[stage].k_scale + pair.member * kMyKeys + 2 * t;
    int acc[kM][kKeyBlocks][4];
#pragma unroll
    for (int k = 0; k < D / 64; ++k) {
      uint32_t a[kM][2][4];
#pragma unroll
      for (int m = 0; m < kM; ++m) {
        tile::load_a<D>(a[m][0], q8 + m * 16 * D, k * 4, lane);
        tile::load_a<D>(a[m][1], q8 + m * 16 * D, k * 4 + 2, lane);
      }
#pragma unroll
      for (int n = 0; n < kKeyBlocks; ++n) {
        uint32_t b[4];
        tile::load_b<D>(b, k8 + n * 8 * D, k * 4, lane);
#pragma unroll
        for (int m = 0; m < kM; ++m) {
          k == 0 ? tile::start_sum(acc[m][n], a[m][0], b[0], b[1])
                 : arch::mma_8(acc[m][n], a[m][0], b[0], b[1]);
          arch::mma_8(acc[m][n], a[m][1], b[2], b[3]);
        }
      }
    }
#pragma unroll
    for (int n = 0; n < kKeyBlocks; ++n) {
      const float4 ks = *reinterpret_cast<const float4*>(k_scale + n * 8);
#pragma unroll
      for (int m = 0; m < kM; ++m)
#pragma unroll
        for (int e = 0; e < 4; ++e)
          x[m][n][e] = arch::exp2_approx(
              fmaf(tile::scaled_sum(acc[m][n][e], e & 1 ? ks.z : ks.x, e & 1 ? ks.w : ks.y),
                   q_lane[m][e >> 1], -lse2[m][e >> 1]));
    }
  }

  /// x = dS from P.
  __device__ void gradients(Scores& x, const Scores& prob, int stage) const {
    const uint32_t do16 = arch::shared_address(shared.do16) + pair.pair * tile::kPairRows * 2 * D;
    const uint32_t v16 =
        arch::shared_address(shared.stage[stage].v16) + pair.member * kMyKeys * 2 * D;
#pragma unroll
    for (int m = 0; m < kM; ++m)
#pragma unroll
      for (int n = 0; n < kKeyBlocks; ++n)
#pragma unroll
        for (int e = 0; e < 4; ++e) x[m][n][e] = 0.0f;
#pragma unroll
    for (int k = 0; k < D / 32; ++k) {
      uint32_t a[kM][2][4];
#pragma unroll
      for (int m = 0; m < kM; ++m) {
        tile::load_a<2 * D>(a[m][0], do16 + m * 32 * D, k * 4, lane);
        tile::load_a<2 * D>(a[m][1], do16 + m * 32 * D, k * 4 + 2, lane);
      }
#pragma unroll
      for (int n = 0; n < kKeyBlocks; ++n) {
        uint32_t b[4];
        tile::load_b<2 * D>(b, v16 + n * 16 * D, k * 4, lane);
#pragma unroll
        for (int m = 0; m < kM; ++m) {
          arch::mma_16<T>(x[m][n], a[m][0], b[0], b[1]);
          arch::mma_16<T>(x[m][n], a[m][1], b[2], b[3]);
        }
      }
    }
#pragma unroll
    for (int m = 0; m < kM; ++m)
#pragma unroll
      for (int n = 0; n < kKeyBlocks; ++n)
#pragma unroll
        for (int e = 0; e < 4; ++e) x[m][n][e] = prob[m][n][e] * (x[m][n][e] - delta[m][e >> 1]);
  }

  /// Folds K's token scale in.
  __device__ void fold(Scores& x, int stage) const {
    const KeyScale* k_scale = shared.stage[stage].k_scale + pair.member * kMyKeys + 2 * t;
#pragma unroll
    for (int n = 0; n < kKeyBlocks; ++n) {
      const float4 ks = *reinterpret_cast<const float4*>(k_scale + n * 8);
#pragma unroll
      for (int m = 0; m < kM; ++m)
#pragma unroll
        for (int e = 0; e < 4; ++e) x[m][n][e] *= e & 1 ? ks.z : ks.x;
    }
  }

  /// Zeroes what the mask hides.
  __device__ void hide(Scores& x, int tile) const {
    const int key0 = tile * kTileK + static_cast<int>(pair.member * kMyKeys + 2 * t);
#pragma unroll
    for (int m = 0; m < kM; ++m)
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        const int first = row(m, r) + band.begin;  // key of the row's band
        const uint32_t here = static_cast<uint32_t>(key0 - first);
        const uint32_t width =
            row(m, r) < s.nq
                ? static_cast<uint32_t>(min(static_cast<int>(band.width()), max(s.nk - first, 0)))
                : 0;
#pragma unroll
        for (int n = 0; n < kKeyBlocks; ++n)
#pragma unroll
          for (int e = 0; e < 2; ++e)
            if (here + n * 8 + e >= width) x[m][n][2 * r + e] = 0.0f;
      }
  }

  /// Largest magnitude that shares a scale with each row.
  __device__ void amax_of(RowValues& amax, const Scores& x) const {
#pragma unroll
    for (int m = 0; m < kM; ++m)
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        amax[m][r] = 0.0f;
#pragma unroll
        for (int n = 0; n < kKeyBlocks; ++n)
#pragma unroll
          for (int e = 2 * r; e < 2 * r + 2; ++e)
            amax[m][r] = arch::max_nan(amax[m][r], fabsf(x[m][n][e]));
        amax[m][r] = tile::quad_max_nan(amax[m][r]);
      }
    pair.put_stat(0, amax);
    pair.sync();
#pragma unroll
    for (int m = 0; m < kM; ++m)
#pragma unroll
      for (int r = 0; r < 2; ++r) amax[m][r] = arch::max_nan(amax[m][r], pair.stat(0, m, r));
    if constexpr (kPaper) agree(amax);
  }

  /// `paper`: one maximum for the tile. Rows with NaN or Inf keep theirs.
  __device__ void agree(RowValues& amax) const {
    float top = 0.0f;
#pragma unroll
    for (int m = 0; m < kM; ++m)
#pragma unroll
      for (int r = 0; r < 2; ++r)
        top = fmaxf(top, numerics::is_finite(amax[m][r]) ? amax[m][r] : 0.0f);
#pragma unroll
    for (int lanes = 4; lanes < 32; lanes *= 2)
      top = fmaxf(top, __shfl_xor_sync(0xffffffffu, top, lanes));
    if (lane == 0) shared.warp_max[pair.pair] = top;
    __syncthreads();
#pragma unroll
    for (int w = 0; w < kPairs; ++w) top = fmaxf(top, shared.warp_max[w]);
#pragma unroll
    for (int m = 0; m < kM; ++m)
#pragma unroll
      for (int r = 0; r < 2; ++r)
        if (numerics::is_finite(amax[m][r])) amax[m][r] = top;
  }

  __device__ void step(int stage, int tile, bool masked) {
    Scores prob, x;
    probabilities(prob, stage);
    gradients(x, prob, stage);
    if (p.partial_kv) {
      if (masked) hide(x, tile);
#pragma unroll
      for (int m = 0; m < kM; ++m)
#pragma unroll
        for (int n = 0; n < kKeyBlocks; ++n)
#pragma unroll
          for (int e = 0; e < 4; ++e) row_sum[m][e >> 1] += x[m][n][e];
    }
    fold(x, stage);
    if (masked) hide(x, tile);
    multiply(x, stage, tile);
  }

  /// Dither: the uniforms of this tile and those after it.
  __device__ void draw(int tile, bool first) {
    uniforms.draw(tile, first, [&](int k_tile, int) {
      return numerics::dither_uniform(p.seed, s.index, head, row0 / kRows, k_tile,
                                      numerics::DitherOperand::ds_query);
    });
  }

  /// dQ += codes of dS · K8.
  __device__ void multiply(const Scores& x, int stage, int tile) {
    uint32_t mine[kM][kSteps][4], other[kM][kSteps][4];
    RowValues amax, scale;
    amax_of(amax, x);
    [[maybe_unused]] float column[kKeyBlocks][2];
    if constexpr (kRounding == Rounding::dither)
      tile::spread_terms<kKeyBlocks>(
          column, {tile::key_term(pair.member * kMyKeys + lane, uniforms(tile, 0))});
#pragma unroll
    for (int m = 0; m < kM; ++m) {
      const tile::Scale low = tile::scale_of(amax[m][0], numerics::kLevels),
                        high = tile::scale_of(amax[m][1], numerics::kLevels);
      scale[m][0] = low.scale, scale[m][1] = high.scale;
      if constexpr (kRounding == Rounding::nearest)
        tile::quantize_rows<tile::Bytes::s8, kKeyBlocks>(mine[m], x[m], low.inverse, high.inverse);
      else
        tile::dither_rows<tile::Bytes::s8, kKeyBlocks>(mine[m], x[m], low.inverse, high.inverse,
                                                       query_term[m], column);
#pragma unroll
      for (int k = 0; k < kSteps; ++k) pair.put_codes(m * kSteps + k, mine[m][k]);
    }
    pair.sync();
#pragma unroll
    for (int m = 0; m < kM; ++m)
#pragma unroll
      for (int k = 0; k < kSteps; ++k) pair.codes(m * kSteps + k, other[m][k]);
    const uint32_t k8t =
        arch::shared_address(shared.stage[stage].k8t) + pair.member * kChannels * kGroup;
    tile::multiply_codes<tile::Bytes::s8, kM, kSteps, kChannelBlocks, D>(dq, mine, other, scale,
                                                                         k8t, pair.member, lane);
  }

  /// dS·K = dS·(K - mean) + rowsum(dS)·mean. Rows of dS sum to zero, to dLSE when that is given,
  /// and to what was added up when the call sees part of the keys.
  __device__ void finish() {
    const float* k_mean = p.k_mean + (static_cast<int64_t>(s.index) * p.hk + kv_head) * D;
    if (p.partial_kv) {
#pragma unroll
      for (int m = 0; m < kM; ++m)
#pragma unroll
        for (int r = 0; r < 2; ++r) row_sum[m][r] = tile::quad_sum(row_sum[m][r]);
      pair.put_stat(0, row_sum);
      pair.sync();
    }
#pragma unroll
    for (int m = 0; m < kM; ++m)
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        if (row(m, r) >= s.nq) continue;
        float total = p.partial_kv ? row_sum[m][r] + pair.stat(0, m, r) : 0.0f;
        if (!p.partial_kv && p.dlse.data != nullptr && lse2[m][r] != INFINITY)
          total = *tile::stat_of(p.dlse, s, head, s.q_begin + row(m, r));
        T* out = tile::row_of<T>(p.dq, s, head, s.q_begin + row(m, r));
#pragma unroll
        for (int c = 0; c < kChannelBlocks; ++c) {
          const int at = static_cast<int>(pair.member * kChannels + 2 * t) + c * 8;
          if (at >= p.d) break;
          tile::store_pair(out + at, p.scale * (dq[m][c][2 * r] + total * k_mean[at]),
                           p.scale * (dq[m][c][2 * r + 1] + total * k_mean[at + 1]), p.dq.vector);
        }
      }
  }
};

template <typename T, int D, int kTileK, int kPairs, bool kPaper, Rounding kRounding, int kStages>
__device__ __forceinline__ void query_block(const BackwardParams& p) {
  using Block = QueryBlock<T, D, kTileK, kPairs, kPaper, kRounding, kStages>;
  static_assert(kPaper || kRounding == Rounding::nearest);
  extern __shared__ __align__(128) uint8_t memory[];
  auto& shared = *reinterpret_cast<typename Block::Shared*>(memory);
  // The last queries of a causal sequence have the most keys: they go first.
  const int block = static_cast<int>(gridDim.x - 1 - blockIdx.x);
  Block b(p, shared, block);

  const int q0 = static_cast<int>(static_cast<int64_t>(block) * Block::kRows - b.s.q_pad);
  if (q0 >= b.s.nq) {  // the padding of a sequence
    arch::cp_async_wait<0>();
    return;
  }
  const int q_last = min(q0 + Block::kRows, b.s.nq) - 1;
  const tile::KeyRange head_keys = tile::visible(p.mask, b.s, q0),
                       tail_keys = tile::visible(p.mask, b.s, q_last);
  const int first = head_keys.begin / kTileK, end = (tail_keys.end + kTileK - 1) / kTileK;
  // Tiles that every row of the block sees whole need no mask. Rows beyond the end have P = 0 and
  // are not written.
  const int whole_begin = (tail_keys.begin + kTileK - 1) / kTileK,
            whole_end = head_keys.end / kTileK;

  if (kStages > 1 && first < end) b.load(0, first);
  arch::cp_async_commit();
  for (int tile = first; tile < end; ++tile) {
    const int stage = kStages > 1 ? (tile - first) & 1 : 0;
    if constexpr (kStages == 1) {
      __syncthreads();
      b.load(0, tile);
      arch::cp_async_commit();
    }
    arch::cp_async_wait<0>();
    __syncthreads();
    if (kStages > 1 && tile + 1 < end) b.load(stage ^ 1, tile + 1);
    arch::cp_async_commit();
    if constexpr (kRounding == Rounding::dither) b.draw(tile, tile == first);
    b.step(stage, tile, tile < whole_begin || tile >= whole_end);
  }
  arch::cp_async_wait<0>();
  b.finish();
}

template <typename T, int D, int kTileK, int kPairs, int kResident, bool kPaper, Rounding kRounding,
          int kStages>
__global__ void __launch_bounds__(64 * kPairs, kResident)
    query_block_kernel(const __grid_constant__ BackwardParams p) {
  constexpr int taken =
                    arch::shared_memory_for(sizeof(QueryBlockShared<D, kTileK, kPairs, kStages>)),
                larger = arch::shared_memory_for(sizeof(QueryBlockShared<D, kTileK, kPairs, 2>));
  if constexpr (arch::runs_here(taken, kStages == 1 ? larger : 0))
    query_block<T, D, kTileK, kPairs, kPaper, kRounding, kStages>(p);
}

/// `vectorwise` has small thread blocks, several on a multiprocessor; `paper` needs whole tiles of
/// 128 queries.
template <typename T, int D, int kTileK, bool kPaper, Rounding kRounding, int kStages>
void run_query_blocks(const BackwardParams& p, int q_blocks, cudaStream_t stream) {
  constexpr int kPairs = kPaper ? 4 : 2, kResident = kPaper ? 1 : 2;
  constexpr int kPerBlock = kBlock / (tile::kPairRows * kPairs);
  launch(query_block_kernel<T, D, kTileK, kPairs, kResident, kPaper, kRounding, kStages>,
         dim3(static_cast<unsigned>(q_blocks * kPerBlock), static_cast<unsigned>(p.h)), 64 * kPairs,
         static_cast<int>(sizeof(QueryBlockShared<D, kTileK, kPairs, kStages>)), p, stream);
}

/// Two stages where shared memory allows.
template <typename T, int D, bool kPaper, Rounding kRounding>
void run_query_blocks(const BackwardParams& p, int q_blocks, cudaStream_t stream) {
  constexpr int kTileK = kPaper ? 64 : kQueryTileK<D>;
  if constexpr (D == 64)
    run_query_blocks<T, D, kTileK, kPaper, kRounding, 2>(p, q_blocks, stream);
  else if (arch::shared_memory_for(sizeof(QueryBlockShared < D, kTileK, kPaper ? 4 : 2, 2 >)) <=
           shared_memory())
    run_query_blocks<T, D, kTileK, kPaper, kRounding, 2>(p, q_blocks, stream);
  else
    run_query_blocks<T, D, kTileK, kPaper, kRounding, 1>(p, q_blocks, stream);
}

}  // namespace sagebwd::cuda::sm80
