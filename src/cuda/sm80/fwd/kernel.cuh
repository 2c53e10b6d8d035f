// SPDX-License-Identifier: Apache-2.0
// O = softmax(c·QKᵀ)·V, one thread block per 32·kPairs queries of a head, looping over tiles of
// kTileK keys.
//
//               keys →   tile 0 | tile 1 | …
//   kPairs warp pairs,  ┌────┬────┬───
//   32 query rows  →    │ m0 │ m1 │ …      S = Q8·K8ᵀ (INT8), P per row and tile (0 … 127), O +=
//   P8·V8 (INT8) each                └────┴────┴───     leading tiles, and tiles whose V holds NaN
//   or Inf: P·V in 16 bit
//
// The members m0, m1 of a pair compute half of the keys of a tile each; they exchange the row
// maximum, then the codes of P, and own half of the channels of O each (tile/warp_pair.cuh). P
// becomes an A operand in registers because V8 is stored transposed in permuted order
// (tile/codes.cuh). O and the row sums are kept relative to a reference exponent that moves only
// when a row's maximum grows by more than 2^kSlack, so rescaling is rare. The barrier at the head
// of the loop protects the ring of key tiles.
#pragma once

#include "cuda/arch/mma_sync.cuh"
#include "cuda/tile/codes.cuh"
#include "cuda/tile/convert.cuh"
#include "cuda/tile/sequence.cuh"
#include "cuda/tile/shared_tile.cuh"
#include "cuda/tile/warp_pair.cuh"
#include "numerics/quantize.h"

namespace sagebwd::cuda::sm80 {

inline constexpr float kSlack = 8.0f;

template <int D, int kTileK, int kPairs>
struct ForwardShared {
  static constexpr int kCodeGroups = tile::kRowBlocks * kTileK / 64;
  struct Stage {
    alignas(128) uint8_t k8[kTileK * D];
    alignas(128) uint8_t v8t[kTileK * D];
    alignas(16) KeyScale k_scale[kTileK];
    alignas(16) float v_scale;
  };
  Stage stage[2];
  alignas(128) uint8_t v16[kTileK * D * 2];
  alignas(16) float v_mean[D];
  tile::PairSpace<kPairs, kCodeGroups, 2> pairs;
};

/// Order-preserving code of a float; NaN is above everything.
__device__ __forceinline__ uint32_t ordered(float x) {
  if (x != x) return 0xffffffffu;
  const uint32_t u = __float_as_uint(x);
  return u & 0x80000000u ? ~u : u | 0x80000000u;
}

template <typename T, int D, int kTileK, int kPairs>
struct ForwardBlock {
  using Shared = ForwardShared<D, kTileK, kPairs>;
  static constexpr int kThreads = 64 * kPairs;
  static constexpr int kRows = tile::kPairRows * kPairs;
  static constexpr int kM = tile::kRowBlocks;
  static constexpr int kMyKeys = kTileK / 2;
  static constexpr int kKeyBlocks = kMyKeys / 8;  // of this warp
  static constexpr int kSteps = kMyKeys / 32;     // INT8 contraction steps of this warp's keys
  static constexpr int kChannels = D / 2;         // of this warp
  static constexpr int kChannelBlocks = kChannels / 8;
  using Scores = float[kM][kKeyBlocks][4];
  using RowValues = tile::RowValues;

  const ForwardParams& p;
  Shared& shared;
  tile::Sequence s;
  tile::WarpPair<kPairs, Shared::kCodeGroups, 2> pair;
  int head, kv_head;
  uint32_t thread, lane, t;
  int row0;  // query of this thread's first row, inside the sequence
  uint32_t q8[kM][D / 32][4];
  RowValues q_lane;
  RowValues top, ref;  // largest logit, reference exponent
  RowValues sum,
      sum_16;  // this lane's share of the row sum, and of that part of it that V itself multiplied
  float o[kM][kChannelBlocks][4];

  __device__ ForwardBlock(const ForwardParams& params, Shared& sh, int block)
      : p(params),
        shared(sh),
        s(tile::sequence_of_block(params.seq, block * kRows / kBlock, true)),
        pair(sh.pairs) {
    head = static_cast<int>(blockIdx.y);
    kv_head = head / p.group;
    thread = threadIdx.x, lane = thread % 32, t = lane % 4;
    const int64_t padded =
        static_cast<int64_t>(block) * kRows + pair.pair * tile::kPairRows + lane / 4;
    row0 = static_cast<int>(padded - s.q_pad);
    const int8_t* q = p.q8 + (head * p.tq + padded) * D + 4 * t;
#pragma unroll
    for (int m = 0; m < kM; ++m) {
#pragma unroll
      for (int k = 0; k < D / 32; ++k)
#pragma unroll
        for (int r = 0; r < 4; ++r)
          q8[m][k][r] = *reinterpret_cast<const uint32_t*>(q + (16 * m + (r & 1) * 8) * D + k * 32 +
                                                           (r >> 1) * 16);
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        q_lane[m][r] = p.lane[head * p.tq + padded + 16 * m + 8 * r];
        top[m][r] = ref[m][r] = -INFINITY, sum[m][r] = sum_16[m][r] = 0.0f;
      }
#pragma unroll
      for (int c = 0; c < kChannelBlocks; ++c)
#pragma unroll
        for (int e = 0; e < 4; ++e) o[m][c][e] = 0.0f;
    }
  }

  __device__ int row(int m, int r) const { return row0 + 16 * m + 8 * r; }
  __device__ tile::KeyRange seen(int m, int r) const {
    return row(m, r) < s.nq ? tile::visible(p.mask, s, row(m, r)) : tile::KeyRange{0, 0};
  }
  __device__ int channel(int c) const { return static_cast<int>(pair.member) * kChannels + c * 8; }

  __device__ void load(int stage, int tile) {
    auto& st = shared.stage[stage];
    const int64_t key = kv_head * p.tk + s.k_pad + static_cast<int64_t>(tile) * kTileK;
    tile::load_tile<kTileK, D, kThreads>(arch::shared_address(st.k8), p.k8 + key * D, thread);
#pragma unroll
    for (int n = 0; n < kTileK / kGroup; ++n)
      tile::load_tile<D, kGroup, kThreads>(arch::shared_address(st.v8t) + n * D * kGroup,
                                           p.v8t + (key + n * kGroup) * D, thread);
    tile::load_linear<kTileK * 8, kThreads>(arch::shared_address(st.k_scale), p.k_scale + key,
                                            thread);
    if (thread == kThreads - 1)
      arch::cp_async_4(arch::shared_address(&st.v_scale), p.v_scale + key / kTileK);
  }

  __device__ void load_v16(int tile) {
    const int64_t key = kv_head * p.tk + s.k_pad + static_cast<int64_t>(tile) * kTileK;
    tile::load_tile<kTileK, 2 * D, kThreads>(arch::shared_address(shared.v16),
                                             static_cast<const T*>(p.v16) + key * D, thread);
  }

  /// x = (Q8·K8ᵀ)·(scale of K) of this warp's keys.
  __device__ void scores(Scores& x, int stage) {
    const uint32_t k8 = arch::shared_address(shared.stage[stage].k8) + pair.member * kMyKeys * D;
    const KeyScale* k_scale = shared.stage[stage].k_scale + pair.member * kMyKeys + 2 * t;
#pragma unroll
    for (int n = 0; n < kKeyBlocks; ++n) {
      int acc[kM][4];
#pragma unroll
      for (int k = 0; k < D / 64; ++k) {
        uint32_t b[4];
        tile::load_b<D>(b, k8 + n * 8 * D, k * 4, lane);
#pragma unroll
        for (int m = 0; m < kM; ++m) {
          k == 0 ? tile::start_sum(acc[m], q8[m][0], b[0], b[1])
                 : arch::mma_s8(acc[m], q8[m][2 * k], b[0], b[1]);
          arch::mma_s8(acc[m], q8[m][2 * k + 1], b[2], b[3]);
        }
      }
      const float4 ks = *reinterpret_cast<const float4*>(k_scale + n * 8);
#pragma unroll
      for (int m = 0; m < kM; ++m)
#pragma unroll
        for (int e = 0; e < 4; ++e)
          x[m][n][e] = tile::scaled_sum(acc[m][e], e & 1 ? ks.z : ks.x, e & 1 ? ks.w : ks.y);
    }
  }

  /// What the mask hides becomes -inf.
  __device__ void hide(Scores& x, int tile) const {
    const int key0 = tile * kTileK + static_cast<int>(pair.member * kMyKeys + 2 * t);
#pragma unroll
    for (int m = 0; m < kM; ++m)
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        const tile::KeyRange range = seen(m, r);
#pragma unroll
        for (int n = 0; n < kKeyBlocks; ++n)
#pragma unroll
          for (int e = 0; e < 2; ++e) {
            const int key = key0 + n * 8 + e;
            if (key < range.begin || key >= range.end) x[m][n][2 * r + e] = -INFINITY;
          }
      }
  }

  /// x becomes p = 2^(s2 - largest of the row in this tile). weight carries the tile over to the
  /// reference exponent. `floating`: V16 holds V itself while O is gathered from V minus its mean,
  /// so the mass is kept apart.
  __device__ void softmax(Scores& x, RowValues& weight, bool floating) {
    RowValues tile_top;
#pragma unroll
    for (int m = 0; m < kM; ++m)
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        float best = -INFINITY;
#pragma unroll
        for (int n = 0; n < kKeyBlocks; ++n)
          best = fmaxf(best, fmaxf(x[m][n][2 * r], x[m][n][2 * r + 1]));
        tile_top[m][r] = tile::quad_max(best);
      }
    pair.put_stat(0, tile_top);
    pair.sync();
    bool move = false;
#pragma unroll
    for (int m = 0; m < kM; ++m)
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        const float best = fmaxf(tile_top[m][r], pair.stat(0, m, r));
        tile_top[m][r] = best == -INFINITY ? -INFINITY : best * q_lane[m][r];
        top[m][r] = fmaxf(top[m][r], tile_top[m][r]);
        move |= !(tile_top[m][r] <= ref[m][r] + kSlack);
      }
    if (__any_sync(0xffffffffu, move)) rescale(tile_top);
#pragma unroll
    for (int m = 0; m < kM; ++m)
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        const float base = tile_top[m][r] == -INFINITY ? 0.0f : tile_top[m][r];
        float mass = 0.0f;
#pragma unroll
        for (int n = 0; n < kKeyBlocks; ++n)
#pragma unroll
          for (int e = 2 * r; e < 2 * r + 2; ++e) {
            x[m][n][e] = arch::exp2_approx(fmaf(x[m][n][e], q_lane[m][r], -base));
            mass += x[m][n][e];
          }
        weight[m][r] =
            tile_top[m][r] == -INFINITY ? 0.0f : arch::exp2_approx(tile_top[m][r] - ref[m][r]);
        sum[m][r] = fmaf(mass, weight[m][r], sum[m][r]);
        if (floating) sum_16[m][r] = fmaf(mass, weight[m][r], sum_16[m][r]);
      }
  }

  /// Moves the reference exponent of the rows that have outgrown it.
  __device__ void rescale(const RowValues& tile_top) {
#pragma unroll
    for (int m = 0; m < kM; ++m)
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        const bool moves = !(tile_top[m][r] <= ref[m][r] + kSlack);
        const float shrink = !moves ? 1.0f
                             : ref[m][r] == -INFINITY
                                 ? 0.0f
                                 : arch::exp2_approx(ref[m][r] - tile_top[m][r]);
        ref[m][r] = moves ? tile_top[m][r] : ref[m][r];
        sum[m][r] *= shrink, sum_16[m][r] *= shrink;
#pragma unroll
        for (int c = 0; c < kChannelBlocks; ++c)
          o[m][c][2 * r] *= shrink, o[m][c][2 * r + 1] *= shrink;
      }
  }

  __device__ void multiply_int8(const Scores& x, const RowValues& weight, int stage) {
    uint32_t mine[kM][kSteps][4], other[kM][kSteps][4];
    RowValues w;
    const float unit = shared.stage[stage].v_scale * (1.0f / numerics::kLevels);
#pragma unroll
    for (int m = 0; m < kM; ++m) {
      tile::quantize_rows<kKeyBlocks>(mine[m], x[m], numerics::kLevels, numerics::kLevels);
#pragma unroll
      for (int k = 0; k < kSteps; ++k) pair.put_codes(m * kSteps + k, mine[m][k]);
      w[m][0] = weight[m][0] * unit, w[m][1] = weight[m][1] * unit;
    }
    pair.sync();
#pragma unroll
    for (int m = 0; m < kM; ++m)
#pragma unroll
      for (int k = 0; k < kSteps; ++k) pair.codes(m * kSteps + k, other[m][k]);
    const uint32_t v8t =
        arch::shared_address(shared.stage[stage].v8t) + pair.member * kChannels * kGroup;
    tile::multiply_codes<kM, kSteps, kChannelBlocks, D>(o, mine, other, w, v8t, pair.member, lane);
  }

  /// P·V with P in the type of V. The codes' memory carries P over.
  __device__ void multiply_16(const Scores& x, const RowValues& weight) {
    const uint32_t v16 = arch::shared_address(shared.v16);
#pragma unroll
    for (int k = 0; k < kMyKeys / 16; ++k) {
      uint32_t a[2][kM][4];
#pragma unroll
      for (int m = 0; m < kM; ++m) {
#pragma unroll
        for (int r = 0; r < 4; ++r) {
          const float w = weight[m][r & 1];
          const float* pq = &x[m][2 * k + (r >> 1)][2 * (r & 1)];
          a[0][m][r] = tile::pack_16<T>(pq[0] * w, pq[1] * w);
        }
        pair.put_codes(m, a[0][m]);
      }
      pair.sync();
#pragma unroll
      for (int m = 0; m < kM; ++m) pair.codes(m, a[1][m]);
#pragma unroll
      for (int who = 0; who < 2; ++who) {
        const uint32_t keys = v16 + ((pair.member ^ who) * kMyKeys + k * 16) * 2 * D;
#pragma unroll
        for (int c = 0; c < kChannelBlocks; c += 2) {
          uint32_t b[4];
          tile::load_b_trans<2 * D>(b, keys, static_cast<uint32_t>(channel(c) / 8), lane);
#pragma unroll
          for (int m = 0; m < kM; ++m) {
            arch::mma_16<T>(o[m][c], a[who][m], b[0], b[1]);
            arch::mma_16<T>(o[m][c + 1], a[who][m], b[2], b[3]);
          }
        }
      }
      pair.sync();  // the next step writes where this one was read
    }
  }

  /// Zeroes NaN and Inf of the 16-bit tile, so that they do not reach rows that do not see them
  /// through 0·NaN.
  __device__ void clean_v16() {
    T* v = reinterpret_cast<T*>(shared.v16);
    for (uint32_t i = thread; i < kTileK * D; i += kThreads)
      if (!numerics::is_finite(static_cast<float>(v[i]))) v[i] = T(0.0f);
  }

  /// Gives NaN and Inf of V to the rows that do see them.
  __device__ void spread_poison(int tile) {
    const int64_t key0 = kv_head * p.tk + s.k_pad;
    const int end = min((tile + 1) * kTileK, s.nk);
    for (int key = tile * kTileK; key < end; ++key) {
      const T* v = static_cast<const T*>(p.v16) + (key0 + key) * D + channel(0) + 2 * t;
#pragma unroll
      for (int c = 0; c < kChannelBlocks; ++c)
#pragma unroll
        for (int e = 0; e < 2; ++e) {
          const float value = static_cast<float>(v[c * 8 + e]);
          if (numerics::is_finite(value)) continue;
#pragma unroll
          for (int m = 0; m < kM; ++m)
#pragma unroll
            for (int r = 0; r < 2; ++r) {
              const tile::KeyRange range = seen(m, r);
              if (key >= range.begin && key < range.end) o[m][c][2 * r + e] += value;
            }
        }
    }
  }

  __device__ void step(int stage, int tile, bool masked) {
    const float v_scale = shared.stage[stage].v_scale;
    const bool poisoned = v_scale != v_scale;
    const bool floating = tile < p.pv16_tiles || poisoned;
    if (floating) {
      load_v16(tile);
      arch::cp_async_commit();
    }
    Scores x;
    RowValues weight;
    scores(x, stage);
    if (masked) hide(x, tile);
    softmax(x, weight, floating);
    if (!floating) {
      multiply_int8(x, weight, stage);
      return;
    }
    arch::cp_async_wait<0>();
    __syncthreads();
    if (poisoned) {
      clean_v16();
      __syncthreads();
    }
    multiply_16(x, weight);
    if (poisoned) spread_poison(tile);
  }

  __device__ void finish() {
#pragma unroll
    for (int m = 0; m < kM; ++m)
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        sum[m][r] = tile::quad_sum(sum[m][r]);
        sum_16[m][r] = tile::quad_sum(sum_16[m][r]);
      }
    pair.put_stat(0, sum);
    pair.put_stat(1, sum_16);
    pair.sync();
    uint32_t best = 0;
#pragma unroll
    for (int m = 0; m < kM; ++m)
#pragma unroll
      for (int r = 0; r < 2; ++r)
        if (row(m, r) < s.nq) best = max(best, finish_row(m, r));
    if (p.max_logit == nullptr) return;
    best = __reduce_max_sync(0xffffffffu, best);
    if (lane == 0 && pair.member == 0)
      atomicMax(p.max_logit + static_cast<int64_t>(s.index) * gridDim.y + head, best);
  }

  /// Writes one row; returns the code of its largest logit.
  __device__ uint32_t finish_row(int m, int r) {
    const float total = sum[m][r] + pair.stat(0, m, r),
                total_16 = sum_16[m][r] + pair.stat(1, m, r);
    const bool any = !(total == 0.0f);  // NaN counts
    const float inverse = any ? 1.0f / total : 0.0f, rest = any ? 1.0f - total_16 * inverse : 0.0f;
    const int64_t token = s.q_begin + row(m, r);
    T* out = tile::row_of<T>(p.o, s, head, token);
#pragma unroll
    for (int c = 0; c < kChannelBlocks; ++c) {
      const int at = channel(c) + static_cast<int>(2 * t);
      if (at >= p.d) break;
      const float2 mu = *reinterpret_cast<const float2*>(shared.v_mean + at);
      tile::store_pair(out + at, any ? o[m][c][2 * r] * inverse + mu.x * rest : 0.0f,
                       any ? o[m][c][2 * r + 1] * inverse + mu.y * rest : 0.0f, p.o.vector);
    }
    if (t != 0 || pair.member != 0) return 0;
    constexpr float kLn2 = static_cast<float>(numerics::kLn2);
    const float mean_logit = p.q_mean_logit[head * p.tq + s.q_pad + row(m, r)];
    *tile::stat_of(p.lse, s, head, token) =
        any ? kLn2 * (ref[m][r] + log2f(total)) + mean_logit : -INFINITY;
    return any ? ordered(total != total ? total : kLn2 * top[m][r] + mean_logit) : 0;
  }
};

template <typename T, int D, int kTileK, int kPairs, int kResident>
__global__ void __launch_bounds__(64 * kPairs, kResident)
    forward_kernel(const __grid_constant__ ForwardParams p) {
  using Block = ForwardBlock<T, D, kTileK, kPairs>;
  extern __shared__ __align__(128) uint8_t memory[];
  auto& shared = *reinterpret_cast<typename Block::Shared*>(memory);
  // The last queries of a causal sequence have the most keys: they go first.
  const int block = static_cast<int>(gridDim.x - 1 - blockIdx.x);
  Block b(p, shared, block);

  // Rows of the block see a contiguous range of keys, both ends growing with the row.
  const int q0 = static_cast<int>(static_cast<int64_t>(block) * Block::kRows - b.s.q_pad);
  if (q0 >= b.s.nq) return;
  const int q_last = min(q0 + Block::kRows, b.s.nq) - 1;
  const tile::KeyRange head_keys = tile::visible(p.mask, b.s, q0),
                       tail_keys = tile::visible(p.mask, b.s, q_last);
  const int first = head_keys.begin / kTileK, end = (tail_keys.end + kTileK - 1) / kTileK;
  // Tiles that every row of the block sees whole need no mask.
  const int whole_begin = (tail_keys.begin + kTileK - 1) / kTileK,
            whole_end = head_keys.end / kTileK;

  if (b.thread < D)
    shared.v_mean[b.thread] =
        p.v_mean[(static_cast<int64_t>(b.s.index) * (gridDim.y / p.group) + b.kv_head) * D +
                 b.thread];
  if (first < end) b.load(0, first);
  arch::cp_async_commit();
  for (int tile = first; tile < end; ++tile) {
    const int stage = (tile - first) & 1;
    arch::cp_async_wait<0>();
    __syncthreads();
    if (tile + 1 < end) b.load(stage ^ 1, tile + 1);
    arch::cp_async_commit();
    b.step(stage, tile, tile < whole_begin || tile >= whole_end);
  }
  __syncthreads();  // v_mean, when there is no tile
  b.finish();
}

}  // namespace sagebwd::cuda::sm80
