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

inline constexpr int kKeyPairs = 2;
inline constexpr int kKeyRows = tile::kPairRows * kKeyPairs;
inline constexpr int kKeyThreads = 64 * kKeyPairs;
inline constexpr int kTileQ = 64;

/// What a thread block works on. It lies in shared memory: few instructions of the loop need it,
/// and in registers it would be in the way of all.
struct KeyWork {
  int first;                   // query where the tiles of a head start
  int steps;                   // of a head
  int whole_begin, whole_end;  // where tiles may start that need no mask
  int key0;                    // first key of the block, inside the sequence
  int kv_head;
  int shift;       // how far key0 lies inside the band of query 0
  uint32_t width;  // of the band
  uint32_t zero;   // which the compiler does not know
  tile::Sequence s;
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
  float warp_max[2][kKeyPairs];             // `paper`: of P and of dS
  float4 k_scale[kKeyPairs][8];             // of rows g, g + 8, g + 16, g + 24
  alignas(8) float query_term[2 * kTileQ];  // of the dither
  alignas(16) KeyWork work;
};

template <typename T, int D, bool kPaper, Rounding kRounding, int kStages>
struct KeyBlock {
  using Shared = KeyBlockShared<D, kStages>;
  using Stage = typename Shared::Stage;
  static constexpr int kM = tile::kRowBlocks;
  static constexpr int kMyQueries = kTileQ / 2;
  static constexpr int kQueryBlocks = kMyQueries / 8;
  static constexpr int kChannels = D / 2;
  static constexpr int kChannelBlocks = kChannels / 8;
  // A tile of 64 queries is one step; in `paper` a tile of 128 takes four: two halves, twice.
  static constexpr int kSpan = kPaper ? 2 * kTileQ : kTileQ, kSteps = kPaper ? 4 : 1;
  using Scores = float[kM][kQueryBlocks][4];
  using Codes = uint32_t[kM][1][4];
  using RowValues = tile::RowValues;
  enum Stat { kP = 0, kDs = 1 };

  const BackwardParams& p;
  uint32_t base;  // address of Shared
  uint32_t thread;
  float dk[kM][kChannelBlocks][4], dv[kM][kChannelBlocks][4];
  tile::Uniforms<2> uniforms;  // of the dither

  __device__ static KeyWork work_of(const BackwardParams& p, int block) {
    KeyWork w;
    w.s = tile::sequence_of_block<kBlock>(p.seq, block * kKeyRows / kBlock, false);
    w.key0 = static_cast<int>(static_cast<int64_t>(block) * kKeyRows - w.s.k_pad);
    w.kv_head = static_cast<int>(blockIdx.y);
    w.zero = 0;
    const tile::Band band = tile::band_of(p.mask, w.s);
    w.shift = w.key0 - band.begin, w.width = band.width();
    const int last_key = min(w.key0 + kKeyRows, w.s.nk) - 1;
    const tile::QueryRange range = tile::visible_to(p.mask, w.s, w.key0, last_key);
    const tile::QueryRange of_first = tile::visible_to(p.mask, w.s, w.key0, w.key0);
    const tile::QueryRange of_last = w.key0 + kKeyRows <= w.s.nk
                                         ? tile::visible_to(p.mask, w.s, last_key, last_key)
                                         : tile::QueryRange{0, 0};
    w.whole_begin = max(of_first.begin, of_last.begin);
    w.whole_end = min(of_first.end, of_last.end) - kTileQ;
    w.first = range.begin / kSpan * kSpan;
    w.steps = range.begin < range.end ? (range.end - w.first + kSpan - 1) / kSpan * kSteps : 0;
    return w;
  }

  __device__ KeyBlock(const BackwardParams& params, uint8_t* shared, const KeyWork& w)
      : p(params), base(arch::shared_address(shared)) {
    // By way of shuffles, or the compiler would ask for slow special registers again and again.
    thread = __shfl_sync(0xffffffffu, threadIdx.x, static_cast<int>(threadIdx.x % 32));
    base = __shfl_sync(0xffffffffu, base, 0);
    const int64_t row = w.kv_head * p.tk + w.s.k_pad + w.key0;
    if (thread == 0) at<KeyWork>(base + offsetof(Shared, work)) = w;
    static_assert(kKeyThreads == 2 * kTileQ, "one term per thread");
    if constexpr (kRounding == Rounding::dither)
      at<float>(base + offsetof(Shared, query_term) + thread * 4) = tile::query_term(thread);
    if (member() == 0 && t() == 0) {
      const auto scale = [&](int m, int r) { return p.k_scale[row + my_row(m, r)].scale; };
      at<float4>(k_scale_at()) = make_float4(scale(0, 0), scale(0, 1), scale(1, 0), scale(1, 1));
    }
#pragma unroll
    for (int m = 0; m < kM; ++m) {
#pragma unroll
      for (int c = 0; c < kChannelBlocks; ++c)
#pragma unroll
        for (int e = 0; e < 4; ++e) dk[m][c][e] = dv[m][c][e] = 0.0f;
    }
    tile::load_tile<kKeyRows, D, kKeyThreads>(base + offsetof(Shared, k8), p.k8 + row * D, thread);
    tile::load_tile<kKeyRows, 2 * D, kKeyThreads>(base + offsetof(Shared, v16),
                                                  static_cast<const T*>(p.v16) + row * D, thread);
    arch::cp_async_commit();
  }

  template <typename V>
  __device__ V& at(uint32_t address) const {
    return *static_cast<V*>(arch::shared_pointer(address, alignof(V)));
  }
  /// Behind the first barrier.
  __device__ const KeyWork& work() const { return at<KeyWork>(base + offsetof(Shared, work)); }
  __device__ uint32_t stage_at(int stage) const {
    return base + static_cast<uint32_t>(offsetof(Shared, stage) + stage * sizeof(Stage));
  }
  __device__ uint32_t k_scale_at() const {
    return base + static_cast<uint32_t>(offsetof(Shared, k_scale)) + pair().pair() * 128 +
           lane() / 4 * 16;
  }

  __device__ tile::WarpPair<kKeyPairs, tile::kRowBlocks, 2> pair() const {
    return {base + static_cast<uint32_t>(offsetof(Shared, pairs)), thread};
  }
  __device__ uint32_t member() const { return pair().member(); }
  __device__ uint32_t lane() const { return thread % 32; }
  __device__ uint32_t t() const { return thread % 4; }
  __device__ uint32_t first_row() const { return pair().pair() * tile::kPairRows; }
  __device__ int my_row(int m, int r) const {
    return static_cast<int>(first_row() + lane() / 4) + 16 * m + 8 * r;
  }

  /// A step of the loop: its head, and its number of the head's.
  struct Step {
    int head, n;
  };
  __device__ Step behind(Step x) const {
    if (++x.n == work().steps) x.n = 0, ++x.head;
    return x;
  }
  // At d 64 registers suffice for dither, which has fewer thread blocks, as it is, and for the
  // others on sm_90 with addresses in them.
  static constexpr bool kRoomy = D == 64 && kRounding == Rounding::dither,
                        kHoldsAddresses = D == 64 && arch::kTarget / 100 == 9;
  /// What follows from the thread's number is worked out again from here on: held in registers all
  /// the time it would push accumulators out of them.
  __device__ void new_phase() {
    if constexpr (!kRoomy && !kHoldsAddresses) thread = arch::thread_index();
  }
  /// The compiler cannot see that a phase runs once, and so does not mix it with its neighbours:
  /// mixed, they would take more registers than there are.
  template <typename Phase>
  __device__ void apart(Phase phase) const {
    do phase();
    while (!kRoomy && work().zero != 0);
  }

  __device__ int query_of(int n) const {
    return work().first + n / kSteps * kSpan + (n % kSteps & 1) * kTileQ;
  }
  __device__ bool masked(int query0) const {
    return query0 < work().whole_begin || query0 > work().whole_end;
  }

  __device__ void load(int stage, Step step) const {
    const uint32_t to = stage_at(stage);
    const int64_t row = step.head * p.tq + work().s.q_pad + query_of(step.n);
    tile::load_tile<kTileQ, D, kKeyThreads>(to + offsetof(Stage, q8), p.q8 + row * D, thread);
    tile::load_tile<D, kSlab, kKeyThreads>(to + offsetof(Stage, q8t), p.q8t + row * D, thread);
    tile::load_tile<kTileQ, 2 * D, kKeyThreads>(to + offsetof(Stage, do16),
                                                static_cast<const T*>(p.do16) + row * D, thread);
    tile::load_tile<D, kSlab, kKeyThreads>(to + offsetof(Stage, do8t), p.do8t + row * D, thread);
    tile::load_linear<kTileQ * 8, kKeyThreads>(to + offsetof(Stage, exponent), p.q_exponent + row,
                                               thread);
    tile::load_linear<kTileQ * 8, kKeyThreads>(to + offsetof(Stage, gradient), p.q_gradient + row,
                                               thread);
  }

  __device__ uint32_t first_query() const { return member() * kMyQueries + 2 * t(); }

  /// Zeroes what the mask hides.
  __device__ void hide(Scores& x, int query0) const {
    const int keys = work().s.nk - work().key0;
    const uint32_t band = work().width;
    // How far the key lies inside the band of the query.
    const int inside = work().shift - query0 - static_cast<int>(first_query());
#pragma unroll
    for (int m = 0; m < kM; ++m)
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        const int row = my_row(m, r);
        const uint32_t here = static_cast<uint32_t>(inside + row);
        const uint32_t width = row < keys ? band : 0;
#pragma unroll
        for (int n = 0; n < kQueryBlocks; ++n)
#pragma unroll
          for (int e = 0; e < 2; ++e)
            if (here - n * 8 - e >= width) x[m][n][2 * r + e] = 0.0f;
      }
  }

  /// φ·P: the values whose codes go into dV.
  __device__ void probabilities(Scores& x, int stage) {
    new_phase();
    const uint32_t k8 = base + static_cast<uint32_t>(offsetof(Shared, k8)) + first_row() * D +
                        tile::a_lane<D>(lane()),
                   q8 = stage_at(stage) + static_cast<uint32_t>(offsetof(Stage, q8)) +
                        member() * kMyQueries * D + tile::b_lane<D>(lane());
    int acc[kM][kQueryBlocks][4];
#pragma unroll
    for (int k = 0; k < D / 32; ++k) {
      uint32_t a[kM][4];
#pragma unroll
      for (int m = 0; m < kM; ++m) arch::ldmatrix_x4(a[m], tile::step_of(k8, k) + m * 16 * D);
#pragma unroll
      for (int n = 0; n < kQueryBlocks; n += 2) {
        uint32_t b[4];
        arch::ldmatrix_x4(b, tile::step_of(q8, k) + n * 8 * D);
#pragma unroll
        for (int h = 0; h < 2; ++h)
#pragma unroll
          for (int m = 0; m < kM; ++m)
            k == 0 ? tile::start_sum(acc[m][n + h], a[m], b[2 * h], b[2 * h + 1])
                   : arch::mma_8(acc[m][n + h], a[m], b[2 * h], b[2 * h + 1]);
      }
    }
    const float4 rows = at<float4>(k_scale_at());
    const RowValues k_scale = {{rows.x, rows.y}, {rows.z, rows.w}};
    const uint32_t exponent = stage_at(stage) + offsetof(Stage, exponent) + first_query() * 8;
#pragma unroll
    for (int n = 0; n < kQueryBlocks; ++n) {
      const float4 q = at<float4>(exponent + n * 64);  // lane, lse2 of two
#pragma unroll
      for (int m = 0; m < kM; ++m)
#pragma unroll
        for (int e = 0; e < 4; ++e)
          x[m][n][e] =
              arch::exp2_approx(fmaf(tile::scaled_sum(acc[m][n][e], k_scale[m][e >> 1],
                                                      -tile::kMagicFloat * k_scale[m][e >> 1]),
                                     e & 1 ? q.z : q.x, e & 1 ? -q.w : -q.y));
    }
  }

  /// x = dS·lane from φ·P: the values whose codes go into dK.
  __device__ void gradients(Scores& x, const Scores& prob, int stage) {
    new_phase();
    const uint32_t v16 = base + static_cast<uint32_t>(offsetof(Shared, v16)) + first_row() * 2 * D +
                         tile::a_lane<2 * D>(lane()),
                   do16 = stage_at(stage) + static_cast<uint32_t>(offsetof(Stage, do16)) +
                          member() * kMyQueries * 2 * D + tile::b_lane<2 * D>(lane());
#pragma unroll
    for (int m = 0; m < kM; ++m)
#pragma unroll
      for (int n = 0; n < kQueryBlocks; ++n)
#pragma unroll
        for (int e = 0; e < 4; ++e) x[m][n][e] = 0.0f;
#pragma unroll
    for (int k = 0; k < D / 16; ++k) {
      uint32_t a[kM][4];
#pragma unroll
      for (int m = 0; m < kM; ++m) arch::ldmatrix_x4(a[m], tile::step_of(v16, k) + m * 32 * D);
#pragma unroll
      for (int n = 0; n < kQueryBlocks; n += 2) {
        uint32_t b[4];
        arch::ldmatrix_x4(b, tile::step_of(do16, k) + n * 16 * D);
#pragma unroll
        for (int h = 0; h < 2; ++h)
#pragma unroll
          for (int m = 0; m < kM; ++m) arch::mma_16<T>(x[m][n + h], a[m], b[2 * h], b[2 * h + 1]);
      }
    }
    const uint32_t gradient = stage_at(stage) + offsetof(Stage, gradient) + first_query() * 8;
#pragma unroll
    for (int n = 0; n < kQueryBlocks; ++n) {
      const float4 q = at<float4>(gradient + n * 64);  // slope, offset of two
#pragma unroll
      for (int m = 0; m < kM; ++m)
#pragma unroll
        for (int e = 0; e < 4; ++e)
          x[m][n][e] = prob[m][n][e] * fmaf(x[m][n][e], e & 1 ? q.z : q.x, e & 1 ? q.w : q.y);
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
    pair().put_stat(which, amax);
    pair().sync();
    RowValues other;
    pair().stat(which, other);
#pragma unroll
    for (int m = 0; m < kM; ++m)
#pragma unroll
      for (int r = 0; r < 2; ++r) amax[m][r] = arch::max_nan(amax[m][r], other[m][r]);
  }

  /// Dither: the uniforms of this tile and those after it.
  __device__ void draw(int head, int query0, bool first) {
    uniforms.draw(query0 / (2 * kTileQ), first, [&](int q_tile, int which) {
      return numerics::dither_uniform(
          p.seed, work().s.index, head, q_tile, work().key0 / kKeyRows,
          which == kP ? numerics::DitherOperand::p_backward : numerics::DitherOperand::ds_key);
    });
  }

  /// Codes of x with one scale per row. amax: of this warp's scores; `paper` has that of the tile
  /// in shared memory instead. `unit` is 1 / levels: dividing here would take registers.
  template <tile::Bytes kA>
  __device__ void quantize(Codes& codes, RowValues& scale, const Scores& x, RowValues& amax,
                           Stat which, float levels, float unit, int query0) {
    new_phase();
    if constexpr (kPaper) {
      pair().sync();  // the other has read the last codes
      pair().my_stat(which, amax);
    } else {
      pair_amax(amax, which);
    }
    [[maybe_unused]] RowValues row;
    [[maybe_unused]] float column[kQueryBlocks][2];
    if constexpr (kRounding == Rounding::dither) {
      const float u = uniforms(query0 / (2 * kTileQ), which);
      tile::spread_row_terms(row, tile::key_term(first_row() + lane(), u));
      const uint32_t term = base + static_cast<uint32_t>(offsetof(Shared, query_term)) +
                            (static_cast<uint32_t>(query0) % (2 * kTileQ) + first_query()) * 4;
#pragma unroll
      for (int n = 0; n < kQueryBlocks; ++n) {
        const float2 v = at<float2>(term + n * 32);
        column[n][0] = v.x, column[n][1] = v.y;
      }
    }
#pragma unroll
    for (int m = 0; m < kM; ++m) {
      const float low = tile::scale_of(amax[m][0], levels).inverse,
                  high = tile::scale_of(amax[m][1], levels).inverse;
#pragma unroll
      for (int r = 0; r < 2; ++r) scale[m][r] = tile::scale_of(amax[m][r], 1.0f).scale * unit;
      if constexpr (kRounding == Rounding::nearest)
        tile::quantize_rows<kA, kQueryBlocks>(codes[m], x[m], low, high);
      else
        tile::dither_rows<kA, kQueryBlocks>(codes[m], x[m], low, high, row[m], column);
      pair().put_codes(m, codes[m][0]);
    }
    pair().sync();
  }

  /// acc += codes·B; B transposed [D, 64] in shared memory.
  template <tile::Bytes kA>
  __device__ void multiply(float (&acc)[kM][kChannelBlocks][4], const Codes& mine,
                           const RowValues& scale, uint32_t transposed) {
    apart([&] {
      new_phase();
      Codes other;
#pragma unroll
      for (int m = 0; m < kM; ++m) pair().codes(m, other[m][0]);
      tile::multiply_codes<kA, kM, 1, kChannelBlocks, D>(
          acc, mine, other, scale, transposed + member() * kChannels * kSlab, member(), lane());
    });
  }

  /// The products of 64 queries.
  __device__ void step(int stage, int query0) {
    Scores prob, x;
    Codes codes;
    RowValues amax, scale;
    probabilities(prob, stage);
    if (masked(query0)) hide(prob, query0);
    if constexpr (!kPaper) clear(amax), row_amax(amax, prob);
    quantize<tile::Bytes::u8>(codes, scale, prob, amax, kP, p.p_levels, p.p_unit, query0);
    multiply<tile::Bytes::u8>(dv, codes, scale, stage_at(stage) + offsetof(Stage, do8t));
    apart([&] { gradients(x, prob, stage); });
    if (masked(query0)) hide(x, query0);
    if constexpr (!kPaper) clear(amax), row_amax(amax, x);
    quantize<tile::Bytes::s8>(codes, scale, x, amax, kDs, numerics::kLevels,
                              1.0f / numerics::kLevels, query0);
    multiply<tile::Bytes::s8>(dk, codes, scale, stage_at(stage) + offsetof(Stage, q8t));
  }

  /// First pass of `paper` over 64 queries; `first`: of a new tile. Between the two halves of the
  /// tile the lane's maxima lie in shared memory.
  __device__ void measure(int stage, int query0, bool first) {
    RowValues amax_p, amax_ds;
    Scores prob, x;
    probabilities(prob, stage);
    if (masked(query0)) hide(prob, query0);
    first ? clear(amax_p) : pair().kept(kP, amax_p);
    row_amax(amax_p, prob);
    if (first) pair().keep(kP, amax_p);
    gradients(x, prob, stage);
    if (masked(query0)) hide(x, query0);
    first ? clear(amax_ds) : pair().kept(kDs, amax_ds);
    row_amax(amax_ds, x);
    first ? pair().keep(kDs, amax_ds) : agree(amax_p, amax_ds);
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
    static_assert(kKeyPairs == 2);
    const auto warp_max = [&](Stat which, uint32_t of) -> float& {
      return at<float>(base + static_cast<uint32_t>(offsetof(Shared, warp_max) + which * 8) +
                       of * 4);
    };
    const uint32_t me = pair().pair();
    if (lane() == 0) warp_max(kP, me) = top_p, warp_max(kDs, me) = top_ds;
    __syncthreads();
    const float tile_p = fmaxf(top_p, warp_max(kP, me ^ 1)),
                tile_ds = fmaxf(top_ds, warp_max(kDs, me ^ 1));
#pragma unroll
    for (int m = 0; m < kM; ++m)
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        if (numerics::is_finite(amax_p[m][r])) amax_p[m][r] = tile_p;
        if (numerics::is_finite(amax_ds[m][r])) amax_ds[m][r] = tile_ds;
      }
    pair().put_stat(kP, amax_p), pair().put_stat(kDs, amax_ds);
  }

  __device__ void finish() {
    constexpr float kLn2 = static_cast<float>(numerics::kLn2);  // Q's folded scale carries c·log2e
    const tile::Sequence& s = work().s;
    const int key0 = work().key0, kv_head = work().kv_head;
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
          const int at = static_cast<int>(member() * kChannels + 2 * t()) + c * 8;
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
  // The first keys of a causal sequence have the most queries, and the grid starts with them.
  const KeyWork w = Block::work_of(p, static_cast<int>(blockIdx.x));
  if (w.key0 >= w.s.nk) return;  // the padding of a sequence
  Block b(p, memory, w);
  int left = w.steps * p.group;
  typename Block::Step now{w.kv_head * p.group, 0};
  __syncthreads();

  if (kStages > 1 && left > 0) b.load(left & 1, now);
  arch::cp_async_commit();
  for (; left > 0; --left) {
    const int stage = kStages > 1 ? left & 1 : 0;
    if constexpr (kStages == 1) {
      __syncthreads();
      b.load(0, now);
      arch::cp_async_commit();
    }
    arch::cp_async_wait<0>();
    __syncthreads();
    if (kStages > 1 && left > 1) b.load(stage ^ 1, b.behind(now));
    arch::cp_async_commit();
    const int q0 = b.query_of(now.n);
    if constexpr (kRounding == Rounding::dither)
      if (now.n % Block::kSteps == 0) b.draw(now.head, q0, now.n == 0);
    if (kPaper && now.n % 4 < 2)
      b.measure(stage, q0, now.n % 4 == 0);
    else
      b.step(stage, q0);
    now = b.behind(now);
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
