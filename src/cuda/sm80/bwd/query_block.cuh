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

#include <cstddef>

#include "cuda/arch/mma_sync.cuh"
#include "cuda/arch/scalar.cuh"
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

/// What a thread block works on. It lies in shared memory: few instructions of the loop need it,
/// and in registers it would be in the way of all.
struct QueryWork {
  int first, end;              // tiles of keys that a row of the block sees
  int whole_begin, whole_end;  // tiles that every row sees whole: no mask
  int q0;                      // first query of the block, inside the sequence
  int head, kv_head;
  tile::Band band;
  tile::Sequence s;
};

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
  alignas(16) QueryWork work;
};

template <typename T, int D, int kTileK, int kPairs, bool kPaper, Rounding kRounding, int kStages>
struct QueryBlock {
  using Shared = QueryBlockShared<D, kTileK, kPairs, kStages>;
  using Stage = typename Shared::Stage;
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
  uint32_t base;  // address of Shared
  uint32_t thread;
  RowValues q_lane, lse2, delta, row_sum;
  float dq[kM][kChannelBlocks][4];
  // Of the dither.
  tile::Uniforms<1> uniforms;
  RowValues query_term;

  __device__ static QueryWork work_of(const BackwardParams& p, int block) {
    QueryWork w;
    w.s = tile::sequence_of_block<kBlock>(p.seq, block * kRows / kBlock, true);
    w.q0 = static_cast<int>(static_cast<int64_t>(block) * kRows - w.s.q_pad);
    w.head = static_cast<int>(blockIdx.y), w.kv_head = w.head / p.group;
    w.band = tile::band_of(p.mask, w.s);
    const int q_last = min(w.q0 + kRows, w.s.nq) - 1;
    const tile::KeyRange head = tile::visible(p.mask, w.s, w.q0),
                         tail = tile::visible(p.mask, w.s, q_last);
    w.first = head.begin / kTileK, w.end = (tail.end + kTileK - 1) / kTileK;
    // Rows beyond the end have P = 0 and are not written.
    w.whole_begin = (tail.begin + kTileK - 1) / kTileK, w.whole_end = head.end / kTileK;
    return w;
  }

  __device__ QueryBlock(const BackwardParams& params, uint8_t* shared, const QueryWork& w)
      : p(params), base(arch::shared_address(shared)) {
    // By way of shuffles, or the compiler would ask for slow special registers again and again.
    thread = __shfl_sync(0xffffffffu, threadIdx.x, static_cast<int>(threadIdx.x % 32));
    base = __shfl_sync(0xffffffffu, base, 0);
    if (thread == 0) at<QueryWork>(base + offsetof(Shared, work)) = w;
    const int64_t first = w.head * p.tq + w.s.q_pad + w.q0;
    const int mine = my_row();
#pragma unroll
    for (int m = 0; m < kM; ++m) {
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        const QueryRow q = p.q_row[first + mine + 16 * m + 8 * r];
        q_lane[m][r] = q.logit_factor, lse2[m][r] = q.lse2, delta[m][r] = q.delta;
        row_sum[m][r] = 0.0f;
        if constexpr (kRounding == Rounding::dither)
          query_term[m][r] = tile::query_term(static_cast<uint32_t>(mine + 16 * m + 8 * r));
      }
#pragma unroll
      for (int c = 0; c < kChannelBlocks; ++c)
#pragma unroll
        for (int e = 0; e < 4; ++e) dq[m][c][e] = 0.0f;
    }
    tile::load_tile<kRows, D, kThreads>(base + offsetof(Shared, q8), p.q8 + first * D, thread);
    tile::load_tile<kRows, 2 * D, kThreads>(base + offsetof(Shared, do16),
                                            static_cast<const T*>(p.do16) + first * D, thread);
    arch::cp_async_commit();
  }

  template <typename V>
  __device__ V& at(uint32_t address) const {
    return *static_cast<V*>(arch::shared_pointer(address, alignof(V)));
  }
  /// Behind the first barrier.
  __device__ const QueryWork& work() const { return at<QueryWork>(base + offsetof(Shared, work)); }
  __device__ uint32_t stage_at(int stage) const {
    return base + static_cast<uint32_t>(offsetof(Shared, stage) + stage * sizeof(Stage));
  }

  __device__ tile::WarpPair<kPairs, Shared::kCodeGroups, 1> pair() const {
    return {base + static_cast<uint32_t>(offsetof(Shared, pairs)), thread};
  }
  __device__ uint32_t member() const { return pair().member(); }
  __device__ uint32_t lane() const { return thread % 32; }
  __device__ uint32_t t() const { return thread % 4; }
  __device__ uint32_t first_row() const { return pair().pair() * tile::kPairRows; }
  __device__ uint32_t first_key() const { return member() * kMyKeys + 2 * t(); }
  /// Of the block's rows, this thread's first.
  __device__ int my_row() const { return static_cast<int>(first_row() + lane() / 4); }
  __device__ int row(int m, int r) const { return work().q0 + my_row() + 16 * m + 8 * r; }

  __device__ void load(int stage, int tile) const {
    const uint32_t to = stage_at(stage);
    const int64_t key =
        work().kv_head * p.tk + work().s.k_pad + static_cast<int64_t>(tile) * kTileK;
    tile::load_tile<kTileK, D, kThreads>(to + offsetof(Stage, k8), p.k8 + key * D, thread);
#pragma unroll
    for (int n = 0; n < kTileK / kSlab; ++n)
      tile::load_tile<D, kSlab, kThreads>(to + offsetof(Stage, k8t) + n * D * kSlab,
                                          p.k8t + (key + n * kSlab) * D, thread);
    tile::load_tile<kTileK, 2 * D, kThreads>(to + offsetof(Stage, v16),
                                             static_cast<const T*>(p.v16) + key * D, thread);
    tile::load_linear<kTileK * 8, kThreads>(to + offsetof(Stage, k_scale), p.k_scale + key, thread);
  }

  __device__ uint32_t k_scale_at(int stage) const {
    return stage_at(stage) + static_cast<uint32_t>(offsetof(Stage, k_scale)) + first_key() * 8;
  }

  __device__ void probabilities(Scores& x, int stage) const {
    const uint32_t q8 = base + static_cast<uint32_t>(offsetof(Shared, q8)) + first_row() * D +
                        tile::a_lane<D>(lane()),
                   k8 = stage_at(stage) + static_cast<uint32_t>(offsetof(Stage, k8)) +
                        member() * kMyKeys * D + tile::b_lane<D>(lane());
    int acc[kM][kKeyBlocks][4];
#pragma unroll
    for (int k = 0; k < D / 32; ++k) {
      uint32_t a[kM][4];
#pragma unroll
      for (int m = 0; m < kM; ++m) arch::ldmatrix_x4(a[m], tile::step_of(q8, k) + m * 16 * D);
#pragma unroll
      for (int n = 0; n < kKeyBlocks; n += 2) {
        uint32_t b[4];
        arch::ldmatrix_x4(b, tile::step_of(k8, k) + n * 8 * D);
#pragma unroll
        for (int h = 0; h < 2; ++h)
#pragma unroll
          for (int m = 0; m < kM; ++m)
            k == 0 ? tile::start_sum(acc[m][n + h], a[m], b[2 * h], b[2 * h + 1])
                   : arch::mma_8(acc[m][n + h], a[m], b[2 * h], b[2 * h + 1]);
      }
    }
#pragma unroll
    for (int n = 0; n < kKeyBlocks; ++n) {
      const float4 ks = at<float4>(k_scale_at(stage) + n * 64);
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
    const uint32_t do16 = base + static_cast<uint32_t>(offsetof(Shared, do16)) +
                          first_row() * 2 * D + tile::a_lane<2 * D>(lane()),
                   v16 = stage_at(stage) + static_cast<uint32_t>(offsetof(Stage, v16)) +
                         member() * kMyKeys * 2 * D + tile::b_lane<2 * D>(lane());
#pragma unroll
    for (int m = 0; m < kM; ++m)
#pragma unroll
      for (int n = 0; n < kKeyBlocks; ++n)
#pragma unroll
        for (int e = 0; e < 4; ++e) x[m][n][e] = 0.0f;
#pragma unroll
    for (int k = 0; k < D / 16; ++k) {
      uint32_t a[kM][4];
#pragma unroll
      for (int m = 0; m < kM; ++m) arch::ldmatrix_x4(a[m], tile::step_of(do16, k) + m * 32 * D);
#pragma unroll
      for (int n = 0; n < kKeyBlocks; n += 2) {
        uint32_t b[4];
        arch::ldmatrix_x4(b, tile::step_of(v16, k) + n * 16 * D);
#pragma unroll
        for (int h = 0; h < 2; ++h)
#pragma unroll
          for (int m = 0; m < kM; ++m) arch::mma_16<T>(x[m][n + h], a[m], b[2 * h], b[2 * h + 1]);
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
#pragma unroll
    for (int n = 0; n < kKeyBlocks; ++n) {
      const float4 ks = at<float4>(k_scale_at(stage) + n * 64);
#pragma unroll
      for (int m = 0; m < kM; ++m)
#pragma unroll
        for (int e = 0; e < 4; ++e) x[m][n][e] *= e & 1 ? ks.z : ks.x;
    }
  }

  __device__ bool masked(int tile) const {
    return tile < work().whole_begin || tile >= work().whole_end;
  }
  /// Zeroes what the mask hides.
  __device__ void hide(Scores& x, int tile) const {
    const int key0 = tile * kTileK + static_cast<int>(first_key()), nq = work().s.nq,
              nk = work().s.nk;
    const tile::Band band = work().band;
#pragma unroll
    for (int m = 0; m < kM; ++m)
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        const int first = row(m, r) + band.begin;  // key of the row's band
        const uint32_t here = static_cast<uint32_t>(key0 - first);
        const uint32_t width =
            row(m, r) < nq
                ? static_cast<uint32_t>(min(static_cast<int>(band.width()), max(nk - first, 0)))
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
    pair().put_stat(0, amax);
    pair().sync();
    RowValues other;
    pair().stat(0, other);
#pragma unroll
    for (int m = 0; m < kM; ++m)
#pragma unroll
      for (int r = 0; r < 2; ++r) amax[m][r] = arch::max_nan(amax[m][r], other[m][r]);
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
    const auto warp_max = [&](uint32_t of) -> float& {
      return at<float>(base + static_cast<uint32_t>(offsetof(Shared, warp_max)) + of * 4);
    };
    if (lane() == 0) warp_max(pair().pair()) = top;
    __syncthreads();
#pragma unroll
    for (uint32_t w = 0; w < kPairs; ++w) top = fmaxf(top, warp_max(w));
#pragma unroll
    for (int m = 0; m < kM; ++m)
#pragma unroll
      for (int r = 0; r < 2; ++r)
        if (numerics::is_finite(amax[m][r])) amax[m][r] = top;
  }

  __device__ void step(int stage, int tile) {
    // What follows from the thread's number is worked out again: from Blackwell on the loop has no
    // registers left to hold it in.
    if constexpr (arch::kTarget >= 1000) thread = arch::thread_index();
    Scores prob, x;
    probabilities(prob, stage);
    gradients(x, prob, stage);
    if (p.partial_kv) {
      if (masked(tile)) hide(x, tile);
#pragma unroll
      for (int m = 0; m < kM; ++m)
#pragma unroll
        for (int n = 0; n < kKeyBlocks; ++n)
#pragma unroll
          for (int e = 0; e < 4; ++e) row_sum[m][e >> 1] += x[m][n][e];
    }
    fold(x, stage);
    if (masked(tile)) hide(x, tile);
    multiply(x, stage, tile);
  }

  /// Dither: the uniforms of this tile and those after it.
  __device__ void draw(int tile, bool first) {
    uniforms.draw(tile, first, [&](int k_tile, int) {
      return numerics::dither_uniform(p.seed, work().s.index, work().head, work().q0 / kRows,
                                      k_tile, numerics::DitherOperand::ds_query);
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
          column, {tile::key_term(member() * kMyKeys + lane(), uniforms(tile, 0))});
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
      for (int k = 0; k < kSteps; ++k) pair().put_codes(m * kSteps + k, mine[m][k]);
    }
    pair().sync();
#pragma unroll
    for (int m = 0; m < kM; ++m)
#pragma unroll
      for (int k = 0; k < kSteps; ++k) pair().codes(m * kSteps + k, other[m][k]);
    const uint32_t k8t = stage_at(stage) + static_cast<uint32_t>(offsetof(Stage, k8t)) +
                         member() * kChannels * kSlab;
    tile::multiply_codes<tile::Bytes::s8, kM, kSteps, kChannelBlocks, D>(dq, mine, other, scale,
                                                                         k8t, member(), lane());
  }

  /// dS·K = dS·(K - mean) + rowsum(dS)·mean. Rows of dS sum to zero, to dLSE when that is given,
  /// and to what was added up when the call sees part of the keys.
  __device__ void finish() {
    const tile::Sequence& s = work().s;
    const int head = work().head, kv_head = work().kv_head;
    const float* k_mean = p.k_mean + (static_cast<int64_t>(s.index) * p.hk + kv_head) * D;
    if (p.partial_kv) {
#pragma unroll
      for (int m = 0; m < kM; ++m)
#pragma unroll
        for (int r = 0; r < 2; ++r) row_sum[m][r] = tile::quad_sum(row_sum[m][r]);
      pair().put_stat(0, row_sum);
      pair().sync();
      RowValues other;
      pair().stat(0, other);
#pragma unroll
      for (int m = 0; m < kM; ++m)
#pragma unroll
        for (int r = 0; r < 2; ++r) row_sum[m][r] += other[m][r];
    }
#pragma unroll
    for (int m = 0; m < kM; ++m)
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        if (row(m, r) >= s.nq) continue;
        float total = p.partial_kv ? row_sum[m][r] : 0.0f;
        if (!p.partial_kv && p.dlse.data != nullptr && lse2[m][r] != INFINITY)
          total = *tile::stat_of(p.dlse, s, head, s.q_begin + row(m, r));
        T* out = tile::row_of<T>(p.dq, s, head, s.q_begin + row(m, r));
#pragma unroll
        for (int c = 0; c < kChannelBlocks; ++c) {
          const int at = static_cast<int>(member() * kChannels + 2 * t()) + c * 8;
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
  // The last queries of a causal sequence have the most keys: they go first.
  const QueryWork w = Block::work_of(p, static_cast<int>(gridDim.x - 1 - blockIdx.x));
  if (w.q0 >= w.s.nq) return;  // the padding of a sequence
  Block b(p, memory, w);
  int left = w.end - w.first;
  __syncthreads();

  if (kStages > 1 && left > 0) b.load(left & 1, w.first);
  arch::cp_async_commit();
  for (; left > 0; --left) {
    const int stage = kStages > 1 ? left & 1 : 0, tile = b.work().end - left;
    if constexpr (kStages == 1) {
      __syncthreads();
      b.load(0, tile);
      arch::cp_async_commit();
    }
    arch::cp_async_wait<0>();
    __syncthreads();
    if (kStages > 1 && left > 1) b.load(stage ^ 1, tile + 1);
    arch::cp_async_commit();
    if constexpr (kRounding == Rounding::dither) b.draw(tile, tile == b.work().first);
    b.step(stage, tile);
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
