// SPDX-License-Identifier: Apache-2.0
// dK and dV: one thread block per 64 keys of a key head, looping over the queries of its query
// heads, 64 at a time.
//
//                   64 queries →
//   2 warp pairs,  ┌──────┬──────┐   Sᵀ  = K8·Q8ᵀ  (INT8)      P  = 2^(S - LSE)
//   32 keys     →  │  m0  │  m1  │   dPᵀ = V·dOᵀ   (16 bit)    dS = P∘(dP - D)
//   each           └──────┴──────┘   dV += P8ᵀ·dO8 (INT8)      dK += dS8ᵀ·Q8 (INT8)
//
// Scores are transposed so that keys are rows: P8 and dS8 are A operands straight from registers,
// dO8 and Q8 come transposed in permuted order. The members m0, m1 of a pair compute 32 queries
// each, exchange row maxima and codes, and own half of the channels of dK and dV each
// (tile/warp_pair.cuh). `vectorwise` has one scale per key and 64 queries. `paper` has one per 128
// queries x 64 keys: the scores of both halves are computed twice, first for their maximum, then
// for the products. The barrier at the head of the loop protects the ring of query tiles.
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

inline constexpr int kKeyPairs = 2;
inline constexpr int kKeyRows = tile::kPairRows * kKeyPairs;
inline constexpr int kKeyThreads = 64 * kKeyPairs;
inline constexpr int kTileQ = 64;

/// The mask as the keys of a thread block see it, counted from its first key on.
struct KeyMask {
  int keys;        // of the sequence
  int shift;       // how far key 0 lies inside the band of query 0
  uint32_t width;  // of the band
};

template <int D, int kStages>
struct KeyBlockShared {
  struct Stage {
    alignas(128) uint8_t q8[kTileQ * D];
    alignas(128) uint8_t q8t[kTileQ * D];
    alignas(128) uint8_t do16[kTileQ * D * 2];
    alignas(128) uint8_t do8t[kTileQ * D];
    alignas(16) QueryExponent exponent[kTileQ];
    alignas(16) QueryGradient gradient[kTileQ];
  };
  alignas(128) uint8_t k8[kKeyRows * D];
  alignas(128) uint8_t v16[kKeyRows * D * 2];
  Stage stage[kStages];
  tile::PairSpace<kKeyPairs, tile::kRowBlocks, 2> pairs;
  float warp_max[2][kKeyPairs];  // `paper`: of P and of dS
  // Few instructions of the loop need these, and in registers they would be in the way of all.
  float4 k_scale[kKeyPairs][8];             // of rows g, g + 8, g + 16, g + 24
  alignas(8) float query_term[2 * kTileQ];  // of the dither
  alignas(16) KeyMask mask;
};

template <typename T, int D, bool kPaper, Rounding kRounding, int kStages>
struct KeyBlock {
  using Shared = KeyBlockShared<D, kStages>;
  static constexpr int kM = tile::kRowBlocks;
  static constexpr int kMyQueries = kTileQ / 2;
  static constexpr int kQueryBlocks = kMyQueries / 8;
  static constexpr int kChannels = D / 2;
  static constexpr int kChannelBlocks = kChannels / 8;
  using Scores = float[kM][kQueryBlocks][4];
  using RowValues = tile::RowValues;
  enum Stat { kP = 0, kDs = 1 };

  const BackwardParams& p;
  Shared& shared;
  tile::Sequence s;
  tile::WarpPair<kKeyPairs, tile::kRowBlocks, 2> pair;
  int kv_head;
  uint32_t thread, lane, t;
  int key0;  // first key of the block, inside the sequence
  // With a mask in registers the compiler would keep a width per row, for which only some instances
  // have room.
  static constexpr bool kMaskInShared = kPaper && D == 64;
  KeyMask held_mask;
  float dk[kM][kChannelBlocks][4], dv[kM][kChannelBlocks][4];
  tile::Uniforms<2> uniforms;  // of the dither

  __device__ KeyBlock(const BackwardParams& params, Shared& sh, int block)
      : p(params),
        shared(sh),
        s(tile::sequence_of_block(params.seq, block * kKeyRows / kBlock, false)),
        pair(sh.pairs) {
    kv_head = static_cast<int>(blockIdx.y);
    thread = threadIdx.x, lane = thread % 32, t = lane % 4;
    const int64_t padded = static_cast<int64_t>(block) * kKeyRows, row = kv_head * p.tk + padded;
    key0 = static_cast<int>(padded - s.k_pad);
    const tile::Band band = tile::band_of(p.mask, s);
    held_mask = {s.nk - key0, key0 - band.begin, band.width()};
    if (kMaskInShared && thread == 0) shared.mask = held_mask;
    static_assert(kKeyThreads == 2 * kTileQ, "one term per thread");
    if constexpr (kRounding == Rounding::dither)
      shared.query_term[thread] = tile::query_term(thread);
    if (pair.member == 0 && t == 0) {
      const auto scale = [&](int m, int r) { return p.k_scale[row + my_row(m, r)].scale; };
      shared.k_scale[pair.pair][lane / 4] =
          make_float4(scale(0, 0), scale(0, 1), scale(1, 0), scale(1, 1));
    }
#pragma unroll
    for (int m = 0; m < kM; ++m) {
#pragma unroll
      for (int c = 0; c < kChannelBlocks; ++c)
#pragma unroll
        for (int e = 0; e < 4; ++e) dk[m][c][e] = dv[m][c][e] = 0.0f;
    }
    tile::load_tile<kKeyRows, D, kKeyThreads>(arch::shared_address(shared.k8), p.k8 + row * D,
                                              thread);
    tile::load_tile<kKeyRows, 2 * D, kKeyThreads>(arch::shared_address(shared.v16),
                                                  static_cast<const T*>(p.v16) + row * D, thread);
    arch::cp_async_commit();
  }

  __device__ int my_row(int m, int r) const {
    return static_cast<int>(pair.pair * tile::kPairRows + lane / 4) + 16 * m + 8 * r;
  }
  __device__ void load(int stage, int head, int query0) {
    auto& st = shared.stage[stage];
    const int64_t row = head * p.tq + s.q_pad + query0;
    tile::load_tile<kTileQ, D, kKeyThreads>(arch::shared_address(st.q8), p.q8 + row * D, thread);
    tile::load_tile<D, kGroup, kKeyThreads>(arch::shared_address(st.q8t), p.q8t + row * D, thread);
    tile::load_tile<kTileQ, 2 * D, kKeyThreads>(arch::shared_address(st.do16),
                                                static_cast<const T*>(p.do16) + row * D, thread);
    tile::load_tile<D, kGroup, kKeyThreads>(arch::shared_address(st.do8t), p.do8t + row * D,
                                            thread);
    tile::load_linear<kTileQ * 8, kKeyThreads>(arch::shared_address(st.exponent),
                                               p.q_exponent + row, thread);
    tile::load_linear<kTileQ * 8, kKeyThreads>(arch::shared_address(st.gradient),
                                               p.q_gradient + row, thread);
  }

  __device__ uint32_t first_query() const { return pair.member * kMyQueries + 2 * t; }

  /// Zeroes what the mask hides.
  __device__ void hide(Scores& x, int query0) const {
    const KeyMask mask = kMaskInShared ? shared.mask : held_mask;
    // How far the key lies inside the band of the query.
    const int inside = mask.shift - query0 - static_cast<int>(first_query());
#pragma unroll
    for (int m = 0; m < kM; ++m)
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        const int row = my_row(m, r);
        const uint32_t here = static_cast<uint32_t>(inside + row);
        const uint32_t width = row < mask.keys ? mask.width : 0;
#pragma unroll
        for (int n = 0; n < kQueryBlocks; ++n)
#pragma unroll
          for (int e = 0; e < 2; ++e)
            if (here - n * 8 - e >= width) x[m][n][2 * r + e] = 0.0f;
      }
  }

  /// φ·P: the values whose codes go into dV.
  __device__ void probabilities(Scores& x, int stage) const {
    const uint32_t q8 = arch::shared_address(shared.stage[stage].q8) + pair.member * kMyQueries * D;
    const uint32_t k8 = arch::shared_address(shared.k8) + pair.pair * tile::kPairRows * D;
    int acc[kM][kQueryBlocks][4];
#pragma unroll
    for (int k = 0; k < D / 64; ++k) {
      uint32_t a[kM][2][4];
#pragma unroll
      for (int m = 0; m < kM; ++m) {
        tile::load_a<D>(a[m][0], k8 + m * 16 * D, k * 4, lane);
        tile::load_a<D>(a[m][1], k8 + m * 16 * D, k * 4 + 2, lane);
      }
#pragma unroll
      for (int n = 0; n < kQueryBlocks; ++n) {
        uint32_t b[4];
        tile::load_b<D>(b, q8 + n * 8 * D, k * 4, lane);
#pragma unroll
        for (int m = 0; m < kM; ++m) {
          k == 0 ? tile::start_sum(acc[m][n], a[m][0], b[0], b[1])
                 : arch::mma_8(acc[m][n], a[m][0], b[0], b[1]);
          arch::mma_8(acc[m][n], a[m][1], b[2], b[3]);
        }
      }
    }
    const float4 rows = shared.k_scale[pair.pair][lane / 4];
    const RowValues k_scale = {{rows.x, rows.y}, {rows.z, rows.w}};
    const QueryExponent* exponent = shared.stage[stage].exponent + first_query();
#pragma unroll
    for (int n = 0; n < kQueryBlocks; ++n)
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        const QueryExponent q = exponent[n * 8 + e];
#pragma unroll
        for (int m = 0; m < kM; ++m)
#pragma unroll
          for (int r = 0; r < 2; ++r)
            x[m][n][2 * r + e] =
                arch::exp2_approx(fmaf(tile::scaled_sum(acc[m][n][2 * r + e], k_scale[m][r],
                                                        -tile::kMagicFloat * k_scale[m][r]),
                                       q.lane, -q.lse2));
      }
  }

  /// x = dS·lane from φ·P: the values whose codes go into dK.
  __device__ void gradients(Scores& x, const Scores& prob, int stage) const {
    const uint32_t do16 =
        arch::shared_address(shared.stage[stage].do16) + pair.member * kMyQueries * 2 * D;
    const uint32_t v16 = arch::shared_address(shared.v16) + pair.pair * tile::kPairRows * 2 * D;
#pragma unroll
    for (int m = 0; m < kM; ++m)
#pragma unroll
      for (int n = 0; n < kQueryBlocks; ++n)
#pragma unroll
        for (int e = 0; e < 4; ++e) x[m][n][e] = 0.0f;
#pragma unroll
    for (int k = 0; k < D / 32; ++k) {
      uint32_t a[kM][2][4];
#pragma unroll
      for (int m = 0; m < kM; ++m) {
        tile::load_a<2 * D>(a[m][0], v16 + m * 32 * D, k * 4, lane);
        tile::load_a<2 * D>(a[m][1], v16 + m * 32 * D, k * 4 + 2, lane);
      }
#pragma unroll
      for (int n = 0; n < kQueryBlocks; ++n) {
        uint32_t b[4];
        tile::load_b<2 * D>(b, do16 + n * 16 * D, k * 4, lane);
#pragma unroll
        for (int m = 0; m < kM; ++m) {
          arch::mma_16<T>(x[m][n], a[m][0], b[0], b[1]);
          arch::mma_16<T>(x[m][n], a[m][1], b[2], b[3]);
        }
      }
    }
    const QueryGradient* gradient = shared.stage[stage].gradient + first_query();
#pragma unroll
    for (int n = 0; n < kQueryBlocks; ++n)
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        const QueryGradient q = gradient[n * 8 + e];
#pragma unroll
        for (int m = 0; m < kM; ++m)
#pragma unroll
          for (int r = 0; r < 2; ++r)
            x[m][n][2 * r + e] =
                prob[m][n][2 * r + e] * fmaf(x[m][n][2 * r + e], q.slope, q.offset);
      }
  }

  __device__ static void row_amax(RowValues& amax, const Scores& x) {
#pragma unroll
    for (int m = 0; m < kM; ++m)
#pragma unroll
      for (int n = 0; n < kQueryBlocks; ++n)
#pragma unroll
        for (int e = 0; e < 4; ++e)
          amax[m][e >> 1] = arch::max_nan(amax[m][e >> 1], fabsf(x[m][n][e]));
  }

  /// Row maxima over both members' queries. Ends with a barrier of the pair behind it.
  __device__ void pair_amax(RowValues& amax, Stat which) const {
#pragma unroll
    for (int m = 0; m < kM; ++m)
#pragma unroll
      for (int r = 0; r < 2; ++r) amax[m][r] = tile::quad_max_nan(amax[m][r]);
    pair.put_stat(which, amax);
    pair.sync();
#pragma unroll
    for (int m = 0; m < kM; ++m)
#pragma unroll
      for (int r = 0; r < 2; ++r) amax[m][r] = arch::max_nan(amax[m][r], pair.stat(which, m, r));
  }

  /// Dither: the uniforms of this tile and those after it.
  __device__ void draw(int head, int query0, bool first) {
    uniforms.draw(query0 / (2 * kTileQ), first, [&](int q_tile, int which) {
      return numerics::dither_uniform(
          p.seed, s.index, head, q_tile, key0 / kKeyRows,
          which == kP ? numerics::DitherOperand::p_backward : numerics::DitherOperand::ds_key);
    });
  }

  /// acc += codes(x)·B with one scale per row; B transposed [D, 64] in shared memory. amax: of this
  /// warp's scores; `paper` has that of the tile in shared memory instead.
  template <tile::Bytes kA>
  __device__ void accumulate(float (&acc)[kM][kChannelBlocks][4], const Scores& x, RowValues& amax,
                             Stat which, float levels, const uint8_t* transposed,
                             int query0) const {
    if constexpr (kPaper) {
      pair.sync();  // the other has read the last codes
#pragma unroll
      for (int m = 0; m < kM; ++m)
#pragma unroll
        for (int r = 0; r < 2; ++r) amax[m][r] = pair.my_stat(which, m, r);
    } else {
      pair_amax(amax, which);
    }
    uint32_t mine[kM][1][4], other[kM][1][4];
    RowValues scale;
    [[maybe_unused]] RowValues row;
    [[maybe_unused]] float column[kQueryBlocks][2];
    if constexpr (kRounding == Rounding::dither) {
      const float u = uniforms(query0 / (2 * kTileQ), which);
      tile::spread_row_terms(row, tile::key_term(pair.pair * tile::kPairRows + lane, u));
      const float* term =
          shared.query_term + static_cast<uint32_t>(query0) % (2 * kTileQ) + first_query();
#pragma unroll
      for (int n = 0; n < kQueryBlocks; ++n) {
        const float2 v = *reinterpret_cast<const float2*>(term + n * 8);
        column[n][0] = v.x, column[n][1] = v.y;
      }
    }
#pragma unroll
    for (int m = 0; m < kM; ++m) {
      const tile::Scale low = tile::scale_of(amax[m][0], levels),
                        high = tile::scale_of(amax[m][1], levels);
      scale[m][0] = low.scale, scale[m][1] = high.scale;
      if constexpr (kRounding == Rounding::nearest)
        tile::quantize_rows<kA, kQueryBlocks>(mine[m], x[m], low.inverse, high.inverse);
      else
        tile::dither_rows<kA, kQueryBlocks>(mine[m], x[m], low.inverse, high.inverse, row[m],
                                            column);
      pair.put_codes(m, mine[m][0]);
    }
    pair.sync();
#pragma unroll
    for (int m = 0; m < kM; ++m) pair.codes(m, other[m][0]);
    tile::multiply_codes<kA, kM, 1, kChannelBlocks, D>(
        acc, mine, other, scale,
        arch::shared_address(transposed) + pair.member * kChannels * kGroup, pair.member, lane);
  }

  /// The products of 64 queries.
  __device__ void step(int stage, int query0, bool masked) {
    Scores prob, x;
    probabilities(prob, stage);
    if (masked) hide(prob, query0);
    RowValues amax;
    if constexpr (!kPaper) clear(amax), row_amax(amax, prob);
    accumulate<tile::Bytes::u8>(dv, prob, amax, kP, p.p_levels, shared.stage[stage].do8t, query0);
    gradients(x, prob, stage);
    if (masked) hide(x, query0);
    if constexpr (!kPaper) clear(amax), row_amax(amax, x);
    accumulate<tile::Bytes::s8>(dk, x, amax, kDs, numerics::kLevels, shared.stage[stage].q8t,
                                query0);
  }

  /// First pass of `paper` over 64 queries; `first`: of a new tile. Between the two halves of the
  /// tile the lane's maxima lie in shared memory.
  __device__ void measure(int stage, int query0, bool masked, bool first) const {
    RowValues amax_p, amax_ds;
    Scores prob, x;
    probabilities(prob, stage);
    if (masked) hide(prob, query0);
    first ? clear(amax_p) : pair.kept(kP, amax_p);
    row_amax(amax_p, prob);
    if (first) pair.keep(kP, amax_p);
    gradients(x, prob, stage);
    if (masked) hide(x, query0);
    first ? clear(amax_ds) : pair.kept(kDs, amax_ds);
    row_amax(amax_ds, x);
    first ? pair.keep(kDs, amax_ds) : agree(amax_p, amax_ds);
  }
  __device__ static void clear(RowValues& x) { x[0][0] = x[0][1] = x[1][0] = x[1][1] = 0.0f; }

  /// Largest finite value of the warp's rows, NaN and Inf left out.
  __device__ static float finite_max(const RowValues& amax) {
    float top = 0.0f;
#pragma unroll
    for (int m = 0; m < kM; ++m)
#pragma unroll
      for (int r = 0; r < 2; ++r)
        top = fmaxf(top, numerics::is_finite(amax[m][r]) ? amax[m][r] : 0.0f);
#pragma unroll
    for (int lanes = 4; lanes < 32; lanes *= 2)
      top = fmaxf(top, __shfl_xor_sync(0xffffffffu, top, lanes));
    return top;
  }

  /// End of the first pass: one maximum per tile of 128 queries x 64 keys (two pairs). Keys with
  /// NaN or Inf keep it.
  __device__ void agree(RowValues& amax_p, RowValues& amax_ds) const {
    pair_amax(amax_p, kP);
    pair_amax(amax_ds, kDs);
    const float top_p = finite_max(amax_p), top_ds = finite_max(amax_ds);
    if (lane == 0) shared.warp_max[kP][pair.pair] = top_p, shared.warp_max[kDs][pair.pair] = top_ds;
    __syncthreads();
    const uint32_t other = pair.pair ^ 1;
    const float tile_p = fmaxf(top_p, shared.warp_max[kP][other]),
                tile_ds = fmaxf(top_ds, shared.warp_max[kDs][other]);
#pragma unroll
    for (int m = 0; m < kM; ++m)
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        if (numerics::is_finite(amax_p[m][r])) amax_p[m][r] = tile_p;
        if (numerics::is_finite(amax_ds[m][r])) amax_ds[m][r] = tile_ds;
      }
    pair.put_stat(kP, amax_p), pair.put_stat(kDs, amax_ds);
  }

  __device__ void finish() {
    constexpr float kLn2 = static_cast<float>(numerics::kLn2);  // Q's folded scale carries c·log2e
#pragma unroll
    for (int m = 0; m < kM; ++m)
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        const int key = key0 + my_row(m, r);
        if (key >= s.nk) continue;
        T* dk_row = tile::row_of<T>(p.dk, s, kv_head, s.k_begin + key);
        T* dv_row = tile::row_of<T>(p.dv, s, kv_head, s.k_begin + key);
#pragma unroll
        for (int c = 0; c < kChannelBlocks; ++c) {
          const int at = static_cast<int>(pair.member * kChannels + 2 * t) + c * 8;
          if (at >= p.d) break;
          tile::store_pair(dk_row + at, dk[m][c][2 * r] * kLn2, dk[m][c][2 * r + 1] * kLn2,
                           p.dk.vector);
          tile::store_pair(dv_row + at, dv[m][c][2 * r], dv[m][c][2 * r + 1], p.dv.vector);
        }
      }
  }
};

template <typename T, int D, bool kPaper, Rounding kRounding, int kStages>
__device__ __forceinline__ void key_block(const BackwardParams& p) {
  using Block = KeyBlock<T, D, kPaper, kRounding, kStages>;
  static_assert(kPaper || kRounding == Rounding::nearest);
  extern __shared__ __align__(128) uint8_t memory[];
  auto& shared = *reinterpret_cast<typename Block::Shared*>(memory);
  // The first keys of a causal sequence have the most queries, and the grid starts with them.
  Block b(p, shared, static_cast<int>(blockIdx.x));

  if (b.key0 >= b.s.nk) {  // the padding of a sequence
    arch::cp_async_wait<0>();
    return;
  }

  const int last_key = min(b.key0 + kKeyRows, b.s.nk) - 1;
  const tile::QueryRange range = tile::visible_to(p.mask, b.s, b.key0, last_key);
  const tile::QueryRange of_first = tile::visible_to(p.mask, b.s, b.key0, b.key0);
  const tile::QueryRange of_last = b.key0 + kKeyRows <= b.s.nk
                                       ? tile::visible_to(p.mask, b.s, last_key, last_key)
                                       : tile::QueryRange{0, 0};
  const int whole_begin = max(of_first.begin, of_last.begin),
            whole_end = min(of_first.end, of_last.end) - kTileQ;
  // A tile of 64 queries is one step; in `paper` a tile of 128 takes four: two halves, twice.
  constexpr int kSpan = kPaper ? 2 * kTileQ : kTileQ, kSteps = kPaper ? 4 : 1;
  const int first = range.begin / kSpan * kSpan;
  const int steps_per_head =
      range.begin < range.end ? (range.end - first + kSpan - 1) / kSpan * kSteps : 0;
  const int steps = steps_per_head * p.group;
  int next_head = b.kv_head * p.group, next_n = 0;  // of the tile to load next
  const auto query_of = [&](int n) {
    return first + n / kSteps * kSpan + (n % kSteps & 1) * kTileQ;
  };
  const auto load_next = [&](int stage) {
    b.load(stage, next_head, query_of(next_n));
    if (++next_n == steps_per_head) next_n = 0, ++next_head;
  };

  if (kStages > 1 && steps > 0) load_next(0);
  arch::cp_async_commit();
  int n = 0;
  for (int i = 0; i < steps; ++i) {
    const int stage = kStages > 1 ? i & 1 : 0;
    if constexpr (kStages == 1) {
      __syncthreads();
      load_next(0);
      arch::cp_async_commit();
    }
    arch::cp_async_wait<0>();
    __syncthreads();
    if (kStages > 1 && i + 1 < steps) load_next(stage ^ 1);
    arch::cp_async_commit();
    const int q0 = query_of(n);
    const bool masked = q0 < whole_begin || q0 > whole_end;
    if constexpr (kRounding == Rounding::dither)
      if (n % kSteps == 0) b.draw(b.kv_head * p.group + i / steps_per_head, q0, n == 0);
    if (kPaper && n % 4 < 2)
      b.measure(stage, q0, masked, n % 4 == 0);
    else
      b.step(stage, q0, masked);
    if (++n == steps_per_head) n = 0;
  }
  arch::cp_async_wait<0>();
  b.finish();
}

/// Thread blocks on a multiprocessor: they share its registers.
template <int D, Rounding kRounding, int kStages>
inline constexpr int kKeyResident = arch::resident(sizeof(KeyBlockShared<D, kStages>),
                                                   D == 64 && kRounding == Rounding::nearest ? 3
                                                                                             : 2);

template <typename T, int D, bool kPaper, Rounding kRounding, int kStages>
__global__ void __launch_bounds__(kKeyThreads, (kKeyResident<D, kRounding, kStages>))
    key_block_kernel(const __grid_constant__ BackwardParams p) {
  constexpr int larger = kStages == 1 ? arch::shared_memory_for(sizeof(KeyBlockShared<D, 2>)) : 0;
  if constexpr (arch::runs_here(arch::shared_memory_for(sizeof(KeyBlockShared<D, kStages>)),
                                larger))
    key_block<T, D, kPaper, kRounding, kStages>(p);
}

template <typename T, int D, bool kPaper, Rounding kRounding, int kStages>
void run_key_blocks(const BackwardParams& p, int k_blocks, cudaStream_t stream) {
  launch(key_block_kernel<T, D, kPaper, kRounding, kStages>,
         dim3(static_cast<unsigned>(k_blocks * (kBlock / kKeyRows)), static_cast<unsigned>(p.hk)),
         kKeyThreads, static_cast<int>(sizeof(KeyBlockShared<D, kStages>)), p, stream);
}

/// Two stages where shared memory allows.
template <typename T, int D, bool kPaper, Rounding kRounding>
void run_key_blocks(const BackwardParams& p, int k_blocks, cudaStream_t stream) {
  if constexpr (D == 64)
    run_key_blocks<T, D, kPaper, kRounding, 2>(p, k_blocks, stream);
  else if (arch::shared_memory_for(sizeof(KeyBlockShared<D, 2>)) <= shared_memory())
    run_key_blocks<T, D, kPaper, kRounding, 2>(p, k_blocks, stream);
  else
    run_key_blocks<T, D, kPaper, kRounding, 1>(p, k_blocks, stream);
}

}  // namespace sagebwd::cuda::sm80
