// SPDX-License-Identifier: Apache-2.0
// O = softmax(c·QKᵀ)·V, one thread block per 16·kWarps queries of a head, looping over tiles of
// kTileK keys.
//
//               keys →  tile 0 | tile 1 | …
//   kWarps warps,      ┌──────┬──────┬───   S = Q8·K8ᵀ (INT8), P per row and tile (0 … p_levels),
//   16 queries each →  │      │      │ …    O += P8·V8 (INT8); at the end the leading tiles, and
//                      └──────┴──────┴───   tiles whose V holds NaN or Inf: P·V in 16 bit
//
// A warp has its rows for itself, so it meets the others only at the barrier that protects the ring
// of key tiles, and small thread blocks fill each other's gaps. P becomes an A operand in registers
// because V8 is stored transposed in permuted order (tile/codes.cuh). O and the row sums are kept
// relative to a reference exponent that moves only when a row's maximum grows by more than
// 2^kSlack, so rescaling is rare.
#pragma once

#include <cstddef>

#include "cuda/arch/mma_sync.cuh"
#include "cuda/arch/scalar.cuh"
#include "cuda/arch/target.cuh"
#include "cuda/host/launch.h"
#include "cuda/sm80/params.h"
#include "cuda/tile/codes.cuh"
#include "cuda/tile/convert.cuh"
#include "cuda/tile/dither.cuh"
#include "cuda/tile/ordered.cuh"
#include "cuda/tile/sequence.cuh"
#include "cuda/tile/shared_tile.cuh"
#include "cuda/tile/walk.cuh"
#include "numerics/quantize.h"
#include "sagebwd/recipe.h"

namespace sagebwd::cuda::sm80 {

inline constexpr float kSlack = 8.0f;
inline constexpr int kDitherQueries = 128;  // of a tile, as far as dither is concerned

/// What a thread block works on. It lies in shared memory: few instructions of the loop need it,
/// and in registers it would be in the way of all.
struct ForwardWork {
  tile::Walk walk;         // over tiles of keys
  tile::WholeTiles whole;  // tiles of keys that need no mask
  int leading;             // steps, from the first on, whose P·V is in 16 bit
  float log_levels;        // log2 of the levels of P
  int head;
  uint32_t keys;  // the sequence's first key in the workspace
  int q0;         // the block's first query, inside the sequence
  tile::Band band;
  tile::Sequence s;
};

template <int D, int kTileK>
struct ForwardShared {
  struct Stage {
    alignas(128) uint8_t k8[kTileK * D];
    alignas(128) uint8_t v8t[kTileK * D];
    alignas(16) KeyScale k_scale[kTileK];
    alignas(16) float v_scale;
  };
  Stage stage[2];  // a 16-bit tile of V takes the place of k8 and v8t
  alignas(16) float v_mean[D];
  alignas(16) ForwardWork work;
  int any_poisoned;  // whether a tile of V that has been multiplied has NaN or Inf
};

template <typename T, int D, int kTileK, int kWarps, Rounding kRounding>
struct ForwardBlock {
  using Shared = ForwardShared<D, kTileK>;
  static constexpr int kThreads = 32 * kWarps;
  static constexpr int kRows = 16 * kWarps;
  static constexpr int kKeyBlocks = kTileK / 8;
  static constexpr int kSteps = kTileK / 32;  // INT8 contraction steps
  static constexpr int kChannelBlocks = D / 8;
  using Scores = float[kKeyBlocks][4];
  using Codes = uint32_t[kSteps][4];
  using RowValues = float[2];  // row g, row g + 8

  const ForwardParams& p;
  uint32_t base;  // address of Shared
  uint32_t thread;
  uint32_t b_k, b_v;  // the lane's part of fragment addresses
  uint32_t q8[D / 32][4];
  RowValues logit_factor;
  RowValues top, ref;  // largest logit, reference exponent
  RowValues sum,
      sum_16;  // this lane's share of the row sum, and of that part of it that V itself multiplied
  float o[kChannelBlocks][4];
  RowValues starts;  // of sums in O that have to come off again
  // Of the dither.
  tile::Uniforms<1> uniforms;
  RowValues query_term;

  __device__ static ForwardWork work_of(const ForwardParams& p, int block) {
    ForwardWork w;
    w.s = tile::sequence_of_block<kBlock>(p.seq, block * kRows / kBlock, true);
    w.band = tile::band_of(p.mask, w.s);
    w.q0 = static_cast<int>(static_cast<int64_t>(block) * kRows - w.s.q_pad);
    const int last = min(w.q0 + kRows, w.s.nq) - 1;
    w.walk = tile::walk_keys(p.mask, w.s, w.q0, last, kTileK);
    w.whole = tile::whole_keys(p.mask, w.s, w.q0, last, kTileK);
    w.leading = w.walk.leading(p.pv16_tiles);
    w.head = static_cast<int>(blockIdx.y);
    w.keys = static_cast<uint32_t>(w.head / p.group * p.tk + w.s.k_pad);
    w.log_levels = log2f(p.p_levels);
    return w;
  }

  __device__ ForwardBlock(const ForwardParams& params, uint8_t* shared, const ForwardWork& w)
      : p(params), base(arch::shared_address(shared)) {
    // By way of a shuffle, or the compiler would ask for the slow special register again and again.
    set_thread(__shfl_sync(0xffffffffu, threadIdx.x, static_cast<int>(threadIdx.x % 32)));
    arch::keep(b_k), arch::keep(b_v), arch::keep(base);
    if (thread == 0) at<ForwardWork>(base + offsetof(Shared, work)) = w, any_poisoned() = 0;
    for (uint32_t c = thread; c < D; c += kThreads)
      at<float>(base + offsetof(Shared, v_mean) + c * 4) =
          p.v_mean[(static_cast<int64_t>(w.s.index) * (gridDim.y / p.group) + w.head / p.group) *
                       D +
                   c];
    const int64_t row = w.head * p.tq + w.s.q_pad + w.q0 + my_row();
    const int8_t* q = p.q8 + row * D + 4 * t();
#pragma unroll
    for (int k = 0; k < D / 32; ++k)
#pragma unroll
      for (int r = 0; r < 4; ++r)
        q8[k][r] = *reinterpret_cast<const uint32_t*>(q + (r & 1) * 8 * D + k * 32 + (r >> 1) * 16);
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      logit_factor[r] = p.logit_factor[row + 8 * r];
      top[r] = ref[r] = -INFINITY, sum[r] = sum_16[r] = starts[r] = 0.0f;
      if constexpr (kRounding == Rounding::dither)
        query_term[r] =
            tile::query_term(static_cast<uint32_t>(w.q0 + my_row() + 8 * r) % kDitherQueries);
    }
#pragma unroll
    for (int c = 0; c < kChannelBlocks; ++c)
#pragma unroll
      for (int e = 0; e < 4; ++e) o[c][e] = 0.0f;
  }

  /// The thread's number, and what is held that follows from it.
  __device__ void set_thread(uint32_t number) {
    thread = number;
    b_k = tile::b_lane<D>(lane()), b_v = tile::swizzled<kSlab>(lane() & 7, lane() >> 3);
  }
  __device__ int& any_poisoned() const { return at<int>(base + offsetof(Shared, any_poisoned)); }
  __device__ uint32_t lane() const { return thread % 32; }
  __device__ uint32_t t() const { return thread % 4; }
  /// Of the block's rows, this thread's first.
  __device__ int my_row() const { return static_cast<int>(thread / 32 * 16 + lane() / 4); }

  /// Behind the first barrier.
  __device__ const ForwardWork& work() const {
    return at<ForwardWork>(base + offsetof(Shared, work));
  }
  __device__ int row(int r) const { return work().q0 + my_row() + 8 * r; }
  /// Keys that a row sees, from the first key of its band on.
  __device__ int band_of(int r) const { return row(r) + work().band.begin; }
  __device__ uint32_t seen(int r) const {
    const ForwardWork& w = work();
    return row(r) < w.s.nq ? static_cast<uint32_t>(
                                 min(static_cast<int>(w.band.width()), max(w.s.nk - band_of(r), 0)))
                           : 0;
  }

  template <typename V>
  __device__ V& at(uint32_t address) const {
    return *static_cast<V*>(arch::shared_pointer(address, alignof(V)));
  }
  using Stage = typename Shared::Stage;
  __device__ uint32_t stage_at(int stage) const {
    return base + static_cast<uint32_t>(stage * sizeof(Stage));
  }

  /// The first key of a tile in the workspace.
  __device__ uint32_t key_row(int tile) const {
    return work().keys + static_cast<uint32_t>(tile) * kTileK;
  }
  /// `row`: that key.
  __device__ void load(int stage, uint32_t row) const {
    const uint32_t to = stage_at(stage);
    const uint64_t first = static_cast<uint64_t>(row) * D;
    tile::load_tile<kTileK, D, kThreads>(to + offsetof(Stage, k8), p.k8 + first, thread);
    tile::load_tile<D*(kTileK / kSlab), kSlab, kThreads>(to + offsetof(Stage, v8t), p.v8t + first,
                                                         thread);
    tile::load_linear<kTileK * 8, kThreads>(to + offsetof(Stage, k_scale), p.k_scale + row, thread);
    if (thread == kThreads - 1)
      arch::cp_async_4(to + offsetof(Stage, v_scale), p.v_scale + row / kTileK);
  }
  /// V in 16 bit takes the place of the codes.
  __device__ void load_v16(int stage, int tile) const {
    static_assert(offsetof(Stage, k8) == 0 && offsetof(Stage, k_scale) == 2 * kTileK * D);
    tile::load_tile<kTileK, 2 * D, kThreads>(
        stage_at(stage), static_cast<const T*>(p.v16) + static_cast<uint64_t>(key_row(tile)) * D,
        thread);
  }

  /// x = (Q8·K8ᵀ)·(scale of K).
  __device__ void scores(Scores& x, int stage) {
    const uint32_t k8 = stage_at(stage) + b_k,
                   k_scale = stage_at(stage) + offsetof(Stage, k_scale) + t() * 16;
    int acc[kKeyBlocks][4];
#pragma unroll
    for (int k = 0; k < D / 32; ++k)
#pragma unroll
      for (int n = 0; n < kKeyBlocks; n += 2) {
        uint32_t b[4];
        arch::ldmatrix_x4(b, tile::step_of(k8, k) + n * 8 * D);
#pragma unroll
        for (int h = 0; h < 2; ++h)
          k == 0 ? tile::start_sum(acc[n + h], q8[0], b[2 * h], b[2 * h + 1])
                 : arch::mma_8(acc[n + h], q8[k], b[2 * h], b[2 * h + 1]);
      }
#pragma unroll
    for (int n = 0; n < kKeyBlocks; ++n) {
      const float4 ks = at<float4>(k_scale + n * 64);
#pragma unroll
      for (int e = 0; e < 4; ++e)
        x[n][e] = tile::scaled_sum(acc[n][e], e & 1 ? ks.z : ks.x, e & 1 ? ks.w : ks.y);
    }
  }

  /// What the mask hides becomes -inf.
  __device__ void hide(Scores& x, int tile) const {
    const int key0 = tile * kTileK + static_cast<int>(2 * t());
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const uint32_t here = static_cast<uint32_t>(key0 - band_of(r)), width = seen(r);
#pragma unroll
      for (int n = 0; n < kKeyBlocks; ++n)
#pragma unroll
        for (int e = 0; e < 2; ++e)
          if (here + n * 8 + e >= width) x[n][2 * r + e] = -INFINITY;
    }
  }

  /// x becomes levels·p, p = 2^(s2 - largest of the row in this tile), which codes round. mass is
  /// this lane's share of the sum.
  __device__ void softmax(Scores& x, RowValues& tile_top, RowValues& mass) {
    RowValues shift;
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      float best[2] = {-INFINITY, -INFINITY};
#pragma unroll
      for (int n = 0; n < kKeyBlocks; ++n)
        best[n & 1] = fmaxf(best[n & 1], fmaxf(x[n][2 * r], x[n][2 * r + 1]));
      const float most = tile::quad_max(fmaxf(best[0], best[1]));
      tile_top[r] = most == -INFINITY ? -INFINITY : most * logit_factor[r];
      shift[r] = most == -INFINITY ? 0.0f : work().log_levels - tile_top[r];
      top[r] = fmaxf(top[r], tile_top[r]);
    }
    float total[2][2] = {};  // two sums of a row side by side: one alone would wait for itself
#pragma unroll
    for (int n = 0; n < kKeyBlocks; ++n)
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        x[n][e] = arch::exp2_approx(fmaf(x[n][e], logit_factor[e >> 1], shift[e >> 1]));
        total[e >> 1][e & 1] += x[n][e];
      }
#pragma unroll
    for (int r = 0; r < 2; ++r) mass[r] = total[r][0] + total[r][1];
  }

  /// weight carries the tile over to the reference exponent, and mass with it. kFloating: sum_16
  /// may hold something.
  template <bool kFloating>
  __device__ void carry_over(const RowValues& tile_top, RowValues& weight, RowValues& mass) {
    bool move = false;
#pragma unroll
    for (int r = 0; r < 2; ++r) move |= !(tile_top[r] <= ref[r] + kSlack);
    if (__any_sync(0xffffffffu, move)) rescale<kFloating>(tile_top);
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      weight[r] = tile_top[r] == -INFINITY ? 0.0f : arch::exp2_approx(tile_top[r] - ref[r]);
      mass[r] *= weight[r];
    }
  }

  /// Moves the reference exponent of the rows that have outgrown it.
  template <bool kFloating>
  __device__ void rescale(const RowValues& tile_top) {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const bool moves = !(tile_top[r] <= ref[r] + kSlack);
      const float shrink = !moves                ? 1.0f
                           : ref[r] == -INFINITY ? 0.0f
                                                 : arch::exp2_approx(ref[r] - tile_top[r]);
      ref[r] = moves ? tile_top[r] : ref[r];
      sum[r] *= shrink;
      if constexpr (kFloating) sum_16[r] *= shrink;
#pragma unroll
      for (int c = 0; c < kChannelBlocks; ++c) o[c][2 * r] *= shrink, o[c][2 * r + 1] *= shrink;
      if constexpr (!kFloating) starts[r] *= shrink;
    }
  }

  /// What has to come off O again (tile/codes.cuh).
  __device__ void take_starts_off() {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
#pragma unroll
      for (int c = 0; c < kChannelBlocks; ++c)
        o[c][2 * r] -= starts[r], o[c][2 * r + 1] -= starts[r];
      starts[r] = 0.0f;
    }
  }

  /// Dither: the uniforms of this tile and those after it.
  __device__ void draw(int tile, bool first_tile) {
    uniforms.draw(tile, first_tile, [&](int k_tile, int) {
      return numerics::dither_uniform(p.seed, work().s.index, work().head,
                                      work().q0 / kDitherQueries, k_tile,
                                      numerics::DitherOperand::p_forward);
    });
  }

  /// Codes of P.
  __device__ void quantize(Codes& a, const Scores& x, int tile) const {
    if constexpr (kRounding == Rounding::nearest) {
      tile::quantize_rows<tile::Bytes::u8, kKeyBlocks>(a, x, 1.0f, 1.0f);
    } else {
      const float u = uniforms(tile, 0);
      float held[kTileK / 32], key_term[kKeyBlocks][2];
#pragma unroll
      for (int i = 0; i < kTileK / 32; ++i)
        held[i] = tile::key_term(static_cast<uint32_t>(32 * i) + lane(), u);
      tile::spread_terms<kKeyBlocks>(key_term, held);
      Scores y;  // the exponential of a large logit may be more than a rounding above the levels
#pragma unroll
      for (int n = 0; n < kKeyBlocks; ++n)
#pragma unroll
        for (int e = 0; e < 4; ++e) y[n][e] = fminf(x[n][e], p.p_levels);
      tile::dither_rows<tile::Bytes::u8, kKeyBlocks>(a, y, 1.0f, 1.0f, query_term, key_term);
    }
  }

  /// Nothing where the scale is NaN.
  __device__ void multiply_int8(const Codes& a, const RowValues& weight, int stage) {
    const float scale = at<float>(stage_at(stage) + offsetof(Stage, v_scale));
    const float unit = scale == scale ? scale * p.p_unit : 0.0f;
    if (scale != scale && thread == 0) any_poisoned() = 1;
    const float w[2] = {weight[0] * unit, weight[1] * unit};
#pragma unroll
    for (int r = 0; r < 2; ++r) starts[r] = tile::count_start(w[r], starts[r]);
    const uint32_t v8t = stage_at(stage) + static_cast<uint32_t>(offsetof(Stage, v8t)) + b_v;
    // Several blocks of channels at a time: chains of products that do not wait for each other.
    constexpr int kAtOnce = D == 64 ? 2 : 4;
#pragma unroll
    for (int c = 0; c < kChannelBlocks; c += kAtOnce) {
      int acc[kAtOnce][4];
#pragma unroll
      for (int k = 0; k < kSteps; k += 2) {
        uint32_t b[kAtOnce][4];
#pragma unroll
        for (int h = 0; h < kAtOnce; ++h)
          arch::ldmatrix_x4(b[h], v8t + (k / 2 * D + (c + h) * 8) * kSlab);
#pragma unroll
        for (int step = 0; step < 2; ++step)
#pragma unroll
          for (int h = 0; h < kAtOnce; ++h)
            k + step == 0 ? tile::start_sum<tile::Bytes::u8>(acc[h], a[0], b[h][0], b[h][1])
                          : arch::mma_8<tile::Bytes::u8>(acc[h], a[k + step], b[h][2 * step],
                                                         b[h][2 * step + 1]);
      }
#pragma unroll
      for (int h = 0; h < kAtOnce; ++h)
#pragma unroll
        for (int e = 0; e < 4; ++e)
          o[c + h][e] = tile::add_with_start(acc[h][e], w[e >> 1], o[c + h][e]);
    }
  }

  /// P·V with P in the type of V.
  __device__ void multiply_16(const Scores& x, const RowValues& weight, int stage) {
    const float w[2] = {weight[0] * p.p_unit, weight[1] * p.p_unit};
    const uint32_t v = stage_at(stage);
#pragma unroll
    for (int k = 0; k < kTileK / 16; ++k) {
      uint32_t a[4];
#pragma unroll
      for (int r = 0; r < 4; ++r) {
        const float* pq = &x[2 * k + (r >> 1)][2 * (r & 1)];
        a[r] = tile::pack_16<T>(pq[0] * w[r & 1], pq[1] * w[r & 1]);
      }
#pragma unroll
      for (int c = 0; c < kChannelBlocks; c += 2) {
        uint32_t b[4];
        tile::load_b_trans<2 * D>(b, v + k * 32 * D, static_cast<uint32_t>(c), lane());
        arch::mma_16<T>(o[c], a, b[0], b[1]);
        arch::mma_16<T>(o[c + 1], a, b[2], b[3]);
      }
    }
  }

  /// Zeroes NaN and Inf of the 16-bit tile, so that they do not reach rows that do not see them
  /// through 0·NaN.
  __device__ void clean_v16(int stage) {
    T* v = &at<T>(stage_at(stage));
    for (uint32_t i = thread; i < kTileK * D; i += kThreads)
      if (!numerics::is_finite(static_cast<float>(v[i]))) v[i] = T(0.0f);
  }

  /// Gives NaN and Inf of V to the rows that do see them.
  __device__ void spread_poison(int tile) {
    const int end = min((tile + 1) * kTileK, work().s.nk);
    for (int key = tile * kTileK; key < end; ++key) {
      const T* v =
          static_cast<const T*>(p.v16) + static_cast<uint64_t>(key_row(0) + key) * D + 2 * t();
#pragma unroll
      for (int c = 0; c < kChannelBlocks; ++c)
#pragma unroll
        for (int e = 0; e < 2; ++e) {
          const float value = static_cast<float>(v[c * 8 + e]);
          if (numerics::is_finite(value)) continue;
#pragma unroll
          for (int r = 0; r < 2; ++r)
            if (static_cast<uint32_t>(key - band_of(r)) < seen(r)) o[c][2 * r + e] += value;
        }
    }
  }

  /// Whether the tile holds NaN or Inf.
  __device__ bool poisoned(int stage) const {
    const float scale = at<float>(stage_at(stage) + offsetof(Stage, v_scale));
    return scale != scale;
  }

  __device__ void finish() {
    uint32_t best = 0;
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      sum[r] = tile::quad_sum(sum[r]) * p.p_unit;
      sum_16[r] = tile::quad_sum(sum_16[r]) * p.p_unit;
      if (row(r) < work().s.nq) best = max(best, finish_row(r));
    }
    if (p.max_logit == nullptr) return;
    best = __reduce_max_sync(0xffffffffu, best);
    if (lane() == 0)
      atomicMax(p.max_logit + static_cast<int64_t>(work().s.index) * gridDim.y + work().head, best);
  }

  /// Writes one row; returns the code of its largest logit.
  __device__ uint32_t finish_row(int r) {
    const bool any = !(sum[r] == 0.0f);  // NaN counts
    const float inverse = any ? 1.0f / sum[r] : 0.0f,
                rest = any ? 1.0f - sum_16[r] * inverse : 0.0f;
    const tile::Sequence& s = work().s;
    const int64_t token = s.q_begin + row(r);
    T* out = tile::row_of<T>(p.o, s, work().head, token);
#pragma unroll
    for (int c = 0; c < kChannelBlocks; ++c) {
      const int channel = c * 8 + static_cast<int>(2 * t());
      if (channel >= p.d) break;
      const float2 mu = at<float2>(base + offsetof(Shared, v_mean) + channel * 4);
      tile::store_pair(out + channel, any ? o[c][2 * r] * inverse + mu.x * rest : 0.0f,
                       any ? o[c][2 * r + 1] * inverse + mu.y * rest : 0.0f, p.o.vector);
    }
    if (t() != 0) return 0;
    constexpr float kLn2 = static_cast<float>(numerics::kLn2);
    const float mean_logit = p.q_mean_logit[work().head * p.tq + s.q_pad + row(r)];
    *tile::stat_of(p.lse, s, work().head, token) =
        any ? kLn2 * (ref[r] + log2f(sum[r])) + mean_logit : -INFINITY;
    return any ? tile::ordered(sum[r] != sum[r] ? sum[r] : kLn2 * top[r] + mean_logit) : 0;
  }
};

template <typename T, int D, int kTileK, int kWarps, int kResident, Rounding kRounding>
__global__ void __launch_bounds__(32 * kWarps,
                                  arch::resident(sizeof(ForwardShared<D, kTileK>), kResident))
    forward_kernel(const __grid_constant__ ForwardParams p) {
  using Block = ForwardBlock<T, D, kTileK, kWarps, kRounding>;
  extern __shared__ __align__(128) uint8_t memory[];
  // The last queries of a causal sequence have the most keys: they go first.
  const int block = static_cast<int>(gridDim.x - 1 - blockIdx.x);
  const ForwardWork w = Block::work_of(p, block);
  if (w.q0 >= w.s.nq) return;
  Block b(p, memory, w);
  const auto scores = [&](auto& x, int stage, int tile) {
    b.scores(x, stage);
    if (!b.work().whole.holds(tile)) b.hide(x, tile);
  };
  const auto wait = [] {
    arch::cp_async_wait<0>();
    __syncthreads();
  };
  typename Block::Scores x;
  typename Block::RowValues top, weight, mass;

  // Tiles in INT8 come first, those in 16 bit behind them: the order does not matter to the sums,
  // and so the loop that takes the time has nothing else in it.
  int stage = 0, left = w.walk.steps - w.leading;  // left: steps in INT8 from this one on
  int next = w.walk.tile(left > 0 ? w.leading : 0);
  if (w.walk.steps > 0) b.load(0, w.keys + static_cast<uint32_t>(next) * kTileK);
  arch::cp_async_commit();
  wait();
  for (bool first = true; left > 0; --left, stage ^= 1, first = false) {
    // From Blackwell on the loop has no registers left to hold these in.
    if constexpr (arch::kTarget >= 1000) b.set_thread(arch::thread_index());
    const int tile = next;
    // Behind the last step in INT8 the first one in 16 bit comes.
    const tile::Walk& walk = b.work().walk;
    next = left > 1 ? walk.next(walk.steps - left, tile) : walk.tile(0);
    b.load(stage ^ 1, b.key_row(next));
    arch::cp_async_commit();
    if constexpr (kRounding == Rounding::dither) b.draw(tile, first);
    scores(x, stage, tile);
    b.softmax(x, top, mass);
    typename Block::Codes codes;
    b.quantize(codes, x, tile);
    // The branch in here keeps codes and products apart: mixed, they would take more registers than
    // there are.
    b.template carry_over<false>(top, weight, mass);
#pragma unroll
    for (int r = 0; r < 2; ++r) b.sum[r] += mass[r];
    b.multiply_int8(codes, weight, stage);
    if (left % tile::kTilesWithStart == 0) b.take_starts_off();
    wait();
  }
  b.take_starts_off();

  // In 16 bit: the leading tiles, and those whose V holds NaN or Inf, whose mass is counted
  // already. V16 lies in the stage that is not the tile's. It is V itself, while O is gathered from
  // V minus its mean, so its mass is kept apart.
  const int last = b.any_poisoned() != 0 ? b.work().walk.steps : b.work().leading;
  for (int step = 0; step < last; ++step) {
    const int tile = b.work().walk.tile(step);
    const bool poisoned = b.poisoned(stage), leading = step < b.work().leading;
    if (leading || poisoned) {
      b.load_v16(stage ^ 1, tile);
      arch::cp_async_commit();
      scores(x, stage, tile);
      b.softmax(x, top, mass);
      b.template carry_over<true>(top, weight, mass);
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        b.sum_16[r] += mass[r];
        if (leading) b.sum[r] += mass[r];
      }
      wait();
      if (poisoned) {
        b.clean_v16(stage ^ 1);
        __syncthreads();
      }
      b.multiply_16(x, weight, stage ^ 1);
      if (poisoned) b.spread_poison(tile);
    }
    __syncthreads();  // before the next tile goes where this one is
    if (step + 1 < last) b.load(stage, b.key_row(b.work().walk.tile(step + 1)));
    arch::cp_async_commit();
    wait();
  }
  b.finish();
}

/// Small thread blocks, three or four of them on a multiprocessor: while one waits at its barrier,
/// or for its products, the others have work of another kind.
template <typename T, int D, int kTileK, Rounding kRounding>
void run_forward(const ForwardParams& p, int q_blocks, int heads, cudaStream_t stream) {
  constexpr int kWarps = 4, kResident = D == 64 ? 3 : 2;
  constexpr int kPerBlock = kBlock / (16 * kWarps);
  launch(forward_kernel<T, D, kTileK, kWarps, kResident, kRounding>,
         dim3(static_cast<unsigned>(q_blocks * kPerBlock), static_cast<unsigned>(heads)),
         32 * kWarps, static_cast<int>(sizeof(ForwardShared<D, kTileK>)), p, stream);
}

}  // namespace sagebwd::cuda::sm80
