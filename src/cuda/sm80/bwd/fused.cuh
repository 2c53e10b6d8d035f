// SPDX-License-Identifier: Apache-2.0
// dK, dV and dQ in one pass over the scores: one thread block per kTileK keys of a key head,
// looping over tiles of kTileQ queries of its query heads.
//
//                     kTileQ queries →
//                    ┌────┬────┬──        Sᵀ  = K8·Q8ᵀ  (INT8)     P  = 2^(S - LSE)
//   groups of        │ w0 │ w1 │ …        dPᵀ = V·dOᵀ   (16 bit)   dS = P∘(dP - D)
//   32 keys       →  ├────┼────┼──        dV += P8ᵀ·dO8 (INT8)     dK += dS8ᵀ·Q8 (INT8)
//                    │ w2 │ w3 │ …        dQ += dS8·K8  (INT8), added up in global memory
//
// Scores are transposed, so keys are rows: the codes of P and dS are A operands straight from
// registers, because dO8 and Q8 come transposed in the order of the accumulators (tile/codes.cuh).
// Two warps have the same keys and half of the queries each; they hand their codes to each other
// and own half of the channels of dK and dV each. For dQ the codes are turned around in
// registers, and each warp takes 32 queries and a part of the channels over all keys of the tile.
//
// What is quantised is y = dS·(scale of Q)·(scale of K): codes for dK have one scale per key and
// codes for dQ one per query, so either factor can be taken out again at the very end, and one y
// serves both products.
//
// One round of the loop:
//   dP, y, largest magnitudes → [barrier] → codes → [barrier] → S and P of the next tile, dV, dK,
//   dQ
// Those two barriers also protect the query tiles in shared memory: the next one is loaded behind
// the first barrier, when S and dP of this one are done, and is there at the second. What dV and dK
// read lies there twice, or, where memory is short, is loaded behind a third barrier.
#pragma once

#include <cstddef>
#include <type_traits>

#include "cuda/arch/global_add.cuh"
#include "cuda/arch/mma_sync.cuh"
#include "cuda/arch/target.cuh"
#include "cuda/arch/transpose.cuh"
#include "cuda/sm80/bwd/fused_scales.cuh"
#include "cuda/tile/codes.cuh"
#include "cuda/tile/convert.cuh"
#include "cuda/tile/sequence.cuh"
#include "cuda/tile/shared_tile.cuh"
#include "numerics/quantize.h"

namespace sagebwd::cuda::sm80 {

template <typename T, class Shape>
struct FusedBlock : FusedScales<Shape> {
  using Lane = FusedScales<Shape>;
  using Lane::base, Lane::thread, Lane::warp, Lane::lane, Lane::t, Lane::group, Lane::member,
      Lane::my_row, Lane::my_queries, Lane::row_at, Lane::key_scales, Lane::front_at, Lane::back_at,
      Lane::operand_at, Lane::query_codes_at, Lane::get_codes, Lane::work;
  using typename Lane::Rows, typename Lane::Scores, typename Lane::Shared, typename Lane::Front,
      typename Lane::Back, typename Lane::Columns;
  static constexpr int D = Shape::D, kM = Shape::kM;
  static constexpr int kTileQ = Shape::kTileQ, kTileK = Shape::kTileK;
  static constexpr int kThreads = Shape::kThreads, kQueryBlocks = Shape::kQueryBlocks;
  static constexpr int kChannels = Shape::kChannels, kChannelBlocks = Shape::kChannelBlocks;
  using Codes = uint32_t[kM][kQueryBlocks / 2][2];  // half a contraction step: rows g and g + 8
  using QueryCodes = uint32_t[2][4];

  const BackwardParams& p;
  // The choices below are those with which the compiler finds enough registers.
  // Fragment addresses of keys and queries hold all but a constant, or only the lane's part.
  static constexpr bool kPaper = Shape::kPaper;
  static constexpr bool kWholeAddresses = D == 128 && !kPaper;
  // Sums of dV and dK are added with their start (tile/codes.cuh).
  static constexpr bool kWithStart = D == 128 && !kPaper;
  // A warp keeps the codes that it made, and reads only the others' from shared memory.
  static constexpr bool kKeepsCodes = D == 64 && !kPaper;
  uint32_t a8, b8, a16, b16, b_t;
  const char* dout;     // d 64: this thread's first chunk of dO of the next tile to load,
  int64_t dout_stride;  // and bytes from row to row
  float dk[kM][kChannelBlocks][4], dv[kM][kChannelBlocks][4];

  __device__ static FusedWork work_of(const BackwardParams& p, int block) {
    FusedWork w;
    w.s = tile::sequence_of_block(p.seq, block * kTileK / kBlock, false);
    w.key0 = static_cast<int>(static_cast<int64_t>(block) * kTileK - w.s.k_pad);
    w.zero = 0;
    w.kv_head = static_cast<int>(blockIdx.y);
    w.band = tile::band_of(p.mask, w.s);
    const int last_key = min(w.key0 + kTileK, w.s.nk) - 1;
    const tile::QueryRange range = tile::visible_to(p.mask, w.s, w.key0, last_key);
    const tile::QueryRange of_first = tile::visible_to(p.mask, w.s, w.key0, w.key0);
    const tile::QueryRange of_last = w.key0 + kTileK <= w.s.nk
                                         ? tile::visible_to(p.mask, w.s, last_key, last_key)
                                         : tile::QueryRange{0, 0};
    const int whole_begin = max(of_first.begin, of_last.begin),
              whole = min(of_first.end, of_last.end) - kTileQ - whole_begin;
    w.whole_begin = whole < 0 ? 0x7fffffff : whole_begin, w.whole = whole < 0 ? 0 : whole;
    w.first = range.begin / kTileQ * kTileQ;
    const int per_head = range.begin < range.end ? (range.end - w.first + kTileQ - 1) / kTileQ : 0;
    w.end = w.first + per_head * kTileQ, w.steps = per_head * p.group;
    w.next_head = static_cast<uint32_t>(p.tq - per_head * kTileQ);
    return w;
  }

  __device__ FusedBlock(const BackwardParams& params, uint8_t* shared, const FusedWork& w)
      : Lane(shared), p(params) {
    const int64_t row = w.kv_head * p.tk + w.s.k_pad + w.key0;
    if (thread == 0) at<FusedWork>(base + offsetof(Shared, work)) = w;
    a8 = tile::a_lane<D>(lane()), b8 = tile::b_lane<D>(lane());
    a16 = tile::a_lane<2 * D>(lane()), b16 = tile::b_lane<2 * D>(lane());
    if constexpr (kWholeAddresses) {
      a8 += first_key8(), b8 += first_query8();
      a16 += first_key16(), b16 += first_query16();
    }
    b_t = tile::swizzled<kGroup>(lane() & 7, lane() >> 3);
#pragma unroll
    for (int m = 0; m < kM; ++m) {
#pragma unroll
      for (int c = 0; c < kChannelBlocks; ++c)
#pragma unroll
        for (int e = 0; e < 4; ++e) dk[m][c][e] = dv[m][c][e] = 0.0f;
    }
    tile::load_tile<kTileK, D, kThreads>(base + offsetof(Shared, k8), p.k8 + row * D, thread);
    load_values(w, row);
    dout_stride = p.do16 == nullptr ? p.dout.token * 2 : D * 2;
    if (thread < kTileK)
      at<float>(base + offsetof(Shared, k_scale) + row_at(thread) * 4) =
          p.k_scale[row + thread].scale;
    tile::load_tile<D*(kTileK / kGroup), kGroup, kThreads>(base + offsetof(Shared, k8t),
                                                           p.k8t + row * D, thread);
    if constexpr (kPaper)
      this->reset_tile(0), this->reset_tile(1);
    else
      this->reset(0), this->reset(1);
    if constexpr (kWithStart)
      at<float>(starts_at(0) + thread * 4) = at<float>(starts_at(1) + thread * 4) = 0.0f;
  }

  template <typename V>
  __device__ V& at(uint32_t address) const {
    return Lane::template at<V>(address);
  }

  /// What follows from these numbers is worked out again in every round of the loop: held in
  /// registers all the time it would push accumulators out of them. A zero that comes from shared
  /// memory keeps the compiler from doing that.
  __device__ void new_round() {
    const uint32_t zero = work().zero;
    if constexpr (D == 64) {
      a8 += zero, b8 += zero, b16 += zero;
    } else if constexpr (kPaper) {
      b_t += zero, a8 += zero;
      b8 = tile::b_lane<D>((lane() + zero) & 31);
    } else {
      b_t += zero;
      b8 = first_query8() + tile::b_lane<D>((lane() + zero) & 31);
      // The same row and chunk where rows are twice as long.
      b16 = b8 + ((b8 - base) & ~127u);
    }
  }

  /// Rows of V, from the caller's tensor where that is possible; `row` is the first in the
  /// workspace.
  __device__ void load_values(const FusedWork& w, int64_t row) const {
    const bool as_is = p.v16 == nullptr;
    tile::load_rows<kTileK, 2 * D, kThreads>(
        base + offsetof(Shared, v16),
        as_is ? tile::row_of<const T>(p.v, w.s, w.kv_head, w.s.k_begin + w.key0)
              : static_cast<const T*>(p.v16) + row * D,
        as_is ? p.v.token * 2 : D * 2, as_is ? w.s.nk - w.key0 : kTileK, thread);
  }

  /// The tiles to load are those of `head` from query0 on. At d 64 dO is read from the caller's
  /// tensor where that is possible.
  __device__ void start_head(const tile::Sequence& s, int head, int query0) {
    if constexpr (D == 64) {
      constexpr int kChunks = 2 * D / 16;
      const uint32_t thread = arch::thread_index();
      const T* first = p.do16 == nullptr
                           ? tile::row_of<const T>(p.dout, s, head, s.q_begin + query0)
                           : static_cast<const T*>(p.do16) + (head * p.tq + s.q_pad + query0) * D;
      dout = reinterpret_cast<const char*>(first) +
             (thread / kChunks * static_cast<uint32_t>(dout_stride) + thread % kChunks * 16);
    }
  }

  /// Starts loading the next tile of queries; `row` is its first in the workspace.
  __device__ void load_front(const FusedWork& w, int stage, uint32_t row, int query0) {
    const uint32_t front = base + front_at(stage);
    if constexpr (D == 64)
      load_dout(w, front + offsetof(Front, do16), query0);
    else
      tile::load_tile<kTileQ, 2 * D, kThreads>(
          front + offsetof(Front, do16),
          static_cast<const T*>(p.do16) + static_cast<uint64_t>(row) * D, thread);
    tile::load_tile<kTileQ, D, kThreads>(front + offsetof(Front, q8),
                                         p.q8 + static_cast<uint64_t>(row) * D, thread);
    // Two queries to a chunk: half of the threads that are needed take exponents, half gradients.
    static_assert(offsetof(Front, gradient) == offsetof(Front, exponent) + kTileQ * 8);
    const void* from = thread < kTileQ / 2 ? static_cast<const void*>(p.q_exponent)
                                           : static_cast<const void*>(p.q_gradient);
    arch::cp_async_16_if(
        thread < kTileQ, front + offsetof(Front, exponent) + thread * 16,
        static_cast<const char*>(from) + row * uint64_t{8} + thread % (kTileQ / 2) * 16);
  }
  __device__ void load_back(int stage, uint32_t row) const {
    const uint32_t back = base + back_at(stage);
    const uint64_t first = static_cast<uint64_t>(row) * D;
    tile::load_tile<D*(kTileQ / kGroup), kGroup, kThreads>(back + offsetof(Back, q8t),
                                                           p.q8t + first, thread);
    tile::load_tile<D*(kTileQ / kGroup), kGroup, kThreads>(back + offsetof(Back, do8t),
                                                           p.do8t + first, thread);
  }

  __device__ void load_dout(const FusedWork& w, uint32_t to, int query0) {
    constexpr int kChunks = 2 * D / 16, kPerPass = kThreads / kChunks;
    const int row = static_cast<int>(thread / kChunks),
              valid = p.do16 == nullptr ? min(w.s.nq - query0, kTileQ) : kTileQ;
    to += tile::chunk_at<2 * D>(thread);
    if (valid == kTileQ) {
#pragma unroll
      for (int i = 0; i < kTileQ / kPerPass; ++i)
        arch::cp_async_16(to + i * kThreads * 16, dout + i * kPerPass * dout_stride);
      dout += kTileQ * dout_stride;
    } else {
#pragma unroll
      for (int i = 0; i < kTileQ / kPerPass; ++i, dout += kPerPass * dout_stride)
        arch::cp_async_16_or_zero(to + i * kThreads * 16, dout, row + i * kPerPass < valid);
    }
  }

  /// Zeroes what the mask hides.
  __device__ void hide(Scores& x, int query0) const {
    const int key0 = work().key0, nk = work().s.nk;
    const tile::Band band = work().band;
    // How far the key lies inside the band of the query.
    const int inside = key0 - query0 - static_cast<int>(my_queries() + 2 * t()) - band.begin;
#pragma unroll
    for (int m = 0; m < kM; ++m)
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        const int row = my_row(m, r);
        const uint32_t here = static_cast<uint32_t>(inside + row);
        const uint32_t width = key0 + row < nk ? band.width() : 0;
#pragma unroll
        for (int n = 0; n < kQueryBlocks; ++n)
#pragma unroll
          for (int e = 0; e < 2; ++e)
            if (here - n * 8 - e >= width) x[m][n][2 * r + e] = 0.0f;
      }
  }

  // Where this warp's keys and queries start in a tile at the start of the memory.
  __device__ uint32_t first_key8() const { return base + group() * 16 * kM * D; }
  __device__ uint32_t first_query8() const { return base + my_queries() * D; }
  __device__ uint32_t first_key16() const { return base + group() * 32 * kM * D; }
  __device__ uint32_t first_query16() const { return base + my_queries() * 2 * D; }
  // Operands of one contraction step: m and n are blocks of 16 rows, `front` is front_at.
  __device__ uint32_t key_address(int m, int k) const {
    const uint32_t at = a8 + static_cast<uint32_t>(offsetof(Shared, k8));
    return tile::step_of(kWholeAddresses ? at : at + first_key8(), k) + m * 16 * D;
  }
  __device__ uint32_t query_address(uint32_t front, int n, int k) const {
    const uint32_t at = b8 + front + static_cast<uint32_t>(offsetof(Front, q8));
    return tile::step_of(kWholeAddresses ? at : at + first_query8(), k) + n * 16 * D;
  }
  __device__ uint32_t value_address(int m, int k) const {
    const uint32_t at = a16 + static_cast<uint32_t>(offsetof(Shared, v16));
    return tile::step_of(kWholeAddresses ? at : at + first_key16(), k) + m * 32 * D;
  }
  __device__ uint32_t dout_address(uint32_t front, int n, int k) const {
    const uint32_t at = b16 + front + static_cast<uint32_t>(offsetof(Front, do16));
    return tile::step_of(kWholeAddresses ? at : at + first_query16(), k) + n * 32 * D;
  }

  /// φ·P: the values whose codes go into dV.
  __device__ void probabilities(Scores& x, int stage) const {
    int acc[kM][kQueryBlocks][4];
#pragma unroll
    for (int k = 0; k < D / 32; ++k) {
      uint32_t a[kM][4], b[kQueryBlocks / 2][4];
#pragma unroll
      for (int m = 0; m < kM; ++m) arch::ldmatrix_x4(a[m], key_address(m, k));
#pragma unroll
      for (int n = 0; n < kQueryBlocks / 2; ++n)
        arch::ldmatrix_x4(b[n], query_address(front_at(stage), n, k));
#pragma unroll
      for (int n = 0; n < kQueryBlocks; ++n)
#pragma unroll
        for (int m = 0; m < kM; ++m)
          k == 0 ? tile::start_sum(acc[m][n], a[m], b[n / 2][n % 2 * 2], b[n / 2][n % 2 * 2 + 1])
                 : arch::mma_8(acc[m][n], a[m], b[n / 2][n % 2 * 2], b[n / 2][n % 2 * 2 + 1]);
    }
    Rows key, zero;  // `zero`: what the start of the sums becomes; exact, scales have 22 bits
    key_scales(key);
#pragma unroll
    for (int m = 0; m < kM; ++m)
#pragma unroll
      for (int r = 0; r < 2; ++r) zero[m][r] = -tile::kMagicFloat * key[m][r];
    const uint32_t exponent =
        base + front_at(stage) + offsetof(Front, exponent) + (my_queries() + 2 * t()) * 8;
#pragma unroll
    for (int n = 0; n < kQueryBlocks; ++n) {
      const float4 q = at<float4>(exponent + n * 64);  // lane, lse2 of two
#pragma unroll
      for (int m = 0; m < kM; ++m)
#pragma unroll
        for (int e = 0; e < 4; ++e)
          x[m][n][e] = arch::exp2_approx(
              fmaf(tile::scaled_sum(acc[m][n][e], key[m][e >> 1], zero[m][e >> 1]),
                   e & 1 ? q.z : q.x, e & 1 ? -q.w : -q.y));
    }
  }

  /// y = dS·lane·(scale of K) from φ·P.
  __device__ void gradients(Scores& y, const Scores& prob, int stage) const {
#pragma unroll
    for (int m = 0; m < kM; ++m)
#pragma unroll
      for (int n = 0; n < kQueryBlocks; ++n)
#pragma unroll
        for (int e = 0; e < 4; ++e) y[m][n][e] = 0.0f;
#pragma unroll
    for (int k = 0; k < D / 16; ++k) {
      uint32_t a[kM][4], b[kQueryBlocks / 2][4];
#pragma unroll
      for (int m = 0; m < kM; ++m) arch::ldmatrix_x4(a[m], value_address(m, k));
#pragma unroll
      for (int n = 0; n < kQueryBlocks / 2; ++n)
        arch::ldmatrix_x4(b[n], dout_address(front_at(stage), n, k));
#pragma unroll
      for (int n = 0; n < kQueryBlocks; ++n)
#pragma unroll
        for (int m = 0; m < kM; ++m)
          arch::mma_16<T>(y[m][n], a[m], b[n / 2][n % 2 * 2], b[n / 2][n % 2 * 2 + 1]);
    }
    Rows key;
    key_scales(key);
    const uint32_t gradient =
        base + front_at(stage) + offsetof(Front, gradient) + (my_queries() + 2 * t()) * 8;
#pragma unroll
    for (int n = 0; n < kQueryBlocks; ++n) {
      const float4 q = at<float4>(gradient + n * 64);  // slope, offset of two
#pragma unroll
      for (int m = 0; m < kM; ++m)
#pragma unroll
        for (int e = 0; e < 4; ++e)
          y[m][n][e] = prob[m][n][e] * key[m][e >> 1] *
                       fmaf(y[m][n][e], e & 1 ? q.z : q.x, e & 1 ? q.w : q.y);
    }
  }

  __device__ static void fill(Rows& x, float value) {
    x[0][0] = x[0][1] = x[1][0] = x[1][1] = value;
  }
  template <tile::Bytes kCode>
  __device__ static void quantize(Codes& codes, const Scores& x, const Rows& inverses) {
#pragma unroll
    for (int m = 0; m < kM; ++m)
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

  /// Hands this warp's codes to the warp that shares its keys.
  __device__ void put_codes(uint32_t to, const Codes& codes) const {
#pragma unroll
    for (int m = 0; m < kM; ++m)
      at<uint4>(base + to + thread * 16 + m * kThreads * 16) =
          make_uint4(codes[m][0][0], codes[m][0][1], codes[m][1][0], codes[m][1][1]);
  }
  /// Codes of y with one scale per query, as A operands with queries as rows; `mine` are this
  /// warp's two, of 16 queries each.
  __device__ void put_query_codes(QueryCodes& mine, const Scores& y, const Columns& inverse) const {
#pragma unroll
    for (int n = 0; n < kQueryBlocks; n += 2) {
      uint32_t a[kM][2];
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        const float i0 = inverse[0][n + h], i1 = inverse[1][n + h];
#pragma unroll
        for (int m = 0; m < kM; ++m) {
          const float(&v)[4] = y[m][n + h];
          a[m][h] = arch::transpose_8x8(
              tile::codes_of<tile::Bytes::s8>(v[0], i0, v[2], i0, v[1], i1, v[3], i1));
        }
      }
      at<uint4>(base + static_cast<uint32_t>(offsetof(Shared, query_codes)) + thread * 16 +
                n / 2 * kThreads * 16) = make_uint4(a[0][0], a[0][1], a[1][0], a[1][1]);
#pragma unroll
      for (int i = 0; i < 4; ++i) mine[n / 2][i] = a[i / 2][i % 2];
    }
  }
  /// The same from codes that have one scale for keys and queries.
  __device__ void turn_codes(const Codes& codes) const {
#pragma unroll
    for (int n = 0; n < kQueryBlocks; n += 2) {
      uint32_t a[kM][2];
#pragma unroll
      for (int m = 0; m < kM; ++m) {
        const uint32_t(&rows)[2] = codes[m][n / 2];
        a[m][0] = arch::transpose_8x8(arch::byte_permute(rows[0], rows[1], 0x5140));
        a[m][1] = arch::transpose_8x8(arch::byte_permute(rows[0], rows[1], 0x7362));
      }
      at<uint4>(base + static_cast<uint32_t>(offsetof(Shared, query_codes)) + thread * 16 +
                n / 2 * kThreads * 16) = make_uint4(a[0][0], a[0][1], a[1][0], a[1][1]);
    }
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

  __device__ void finish() {
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

template <typename T, class Shape>
__device__ __forceinline__ void fused(const BackwardParams& p) {
  using Block = FusedBlock<T, Shape>;
  constexpr int kTileQ = Shape::kTileQ, kBacks = Shape::kBacks;
  constexpr bool kPaper = Shape::kPaper;
  extern __shared__ __align__(128) uint8_t memory[];
  // The first keys of a causal sequence have the most queries, and the grid starts with them.
  const FusedWork w = Block::work_of(p, static_cast<int>(blockIdx.x));
  if (w.key0 >= w.s.nk) return;  // the padding of a sequence
  Block b(p, memory, w);

  /// A tile of queries: the first one's place in the sequence and in the workspace.
  struct Tile {
    int query;
    uint32_t row;
  };
  const auto masked = [&](const Tile& c) {
    return static_cast<uint32_t>(c.query - w.whole_begin) > w.whole;
  };
  int left = w.steps;              // tiles from `now` on
  int head = w.kv_head * p.group;  // of the tile that is loaded next
  Tile now{w.first, static_cast<uint32_t>(head * p.tq + w.s.q_pad + w.first)}, loading = now;
  // Goes on to the next tile; says whether that is of the next head.
  const auto advance = [&](Tile& c) {
    c.query += kTileQ, c.row += kTileQ;
    if (c.query < w.end) return false;
    c.query = w.first, c.row += w.next_head;
    return true;
  };
  b.start_head(w.s, head, w.first);
  // Starts loading the tile that comes `ahead` tiles after `now`; behind the last, nothing.
  const auto load_next = [&](int ahead, int stage, bool back) {
    if (left > ahead) {
      b.load_front(w, stage, loading.row, loading.query);
      if (back) b.load_back(stage, loading.row);
      if (advance(loading) && left > ahead + 1) b.start_head(w.s, ++head, w.first);
    }
    arch::cp_async_commit();
  };

  // With two places each, a tile's front is asked for two tiles ahead, and its back one.
  constexpr bool kApart = Shape::kFronts == 2;
  constexpr int kAhead = kBacks == 3 || kApart ? 2 : 1;
  load_next(0, 0, true);
  if constexpr (kAhead == 2) load_next(1, 1, !kApart);
  int stage = 0;
  arch::cp_async_wait<kAhead - 1>();
  __syncthreads();
  typename Block::Scores prob;
  if (left > 0) {
    b.probabilities(prob, stage);
    if (masked(now)) b.hide(prob, now.query);
  }
  for (; left > 0; --left) {
    b.new_round();
    const uint32_t maxima = b.maxima_at(left & 1);
    typename Block::Codes p_codes, ds_codes;
    typename Block::QueryCodes query_codes;
    [[maybe_unused]] const uint32_t tile_scales = b.tile_scales_at(left & 1);
    [[maybe_unused]] bool poisoned = false;  // `paper`: the tile holds NaN or Inf
    {
      typename Block::Scores y;
      b.gradients(y, prob, stage);
      if (masked(now)) b.hide(y, now.query);
      if constexpr (kPaper) {
        b.share_tile_scales(tile_scales, prob, y, p.p_unit);
      } else {
        b.share_p_scales(maxima + Block::kP, prob, p.p_unit);
        b.share_ds_scales(maxima + Block::kDs, y);
        b.share_query_scales(maxima + Block::kQuery, y);
      }
      __syncthreads();
      if constexpr (kApart) {
        Tile next = now;
        advance(next);
        if (left > 1) b.load_back(stage ^ 1, next.row);
        load_next(kAhead, stage, false);
      } else {
        load_next(kAhead, stage == 0 ? kBacks - 1 : stage - 1, kBacks > 1);
      }
      if constexpr (kPaper) {
        b.reset_tile((left + 1) & 1);
        const auto scale = [&](int which) {
          return b.template at<float>(tile_scales + 16 * which);
        };
        poisoned = !(numerics::is_finite(scale(0)) && numerics::is_finite(scale(1)));
        if (poisoned) b.part_poisoned(left & 1, prob, y, p.p_unit);
        typename Block::Rows inverse;
        Block::fill(inverse, arch::reciprocal_approx(scale(0)));
        Block::template quantize<tile::Bytes::u8>(p_codes, prob, inverse);
        b.put_codes(Block::kPCodes, p_codes);
        Block::fill(inverse, arch::reciprocal_approx(scale(1)));
        Block::template quantize<tile::Bytes::s8>(ds_codes, y, inverse);
        b.put_codes(Block::kDsCodes, ds_codes);
        b.turn_codes(ds_codes);
      } else {
        b.reset((left + 1) & 1);
        // All at once: one wait for shared memory and reciprocals instead of three.
        typename Block::Rows p_inverse, ds_inverse;
        typename Block::Columns query_inverse;
        b.row_inverses(p_inverse, maxima + Block::kP);
        b.row_inverses(ds_inverse, maxima + Block::kDs);
        b.query_inverses(query_inverse, maxima + Block::kQuery);
        Block::template quantize<tile::Bytes::u8>(p_codes, prob, p_inverse);
        b.put_codes(Block::kPCodes, p_codes);
        Block::template quantize<tile::Bytes::s8>(ds_codes, y, ds_inverse);
        b.put_codes(Block::kDsCodes, ds_codes);
        b.put_query_codes(query_codes, y, query_inverse);
      }
    }
    arch::cp_async_wait<kAhead - 1>();
    __syncthreads();
    if (Block::kWithStart && Block::is_first_of_place(left))
      b.take_starts_off(Block::place_of(left) ^ 1);
    const uint32_t back = Block::back_at(stage), row = now.row;
    advance(now);
    stage = stage + 1 == kBacks ? 0 : stage + 1;
    // S and P of the next tile go with the products, if registers allow. Behind the last tile this
    // works on what lies there, to no effect.
    constexpr bool kMixed = !(kPaper && Shape::D == 128);
    if constexpr (kMixed) b.probabilities(prob, stage);
    const auto one_scale = [&] { return kPaper && !poisoned; };
    typename Block::Rows scale;
    b.get_four(scale, one_scale() ? tile_scales : b.rows_of(maxima + Block::kP));
    b.template multiply<tile::Bytes::u8>(b.dv, Block::kPCodes, p_codes, scale,
                                         back + offsetof(typename Block::Back, do8t));
    b.get_four(scale, one_scale() ? tile_scales + 16 : b.rows_of(maxima + Block::kDs));
    b.template multiply<tile::Bytes::s8>(b.dk, Block::kDsCodes, ds_codes, scale,
                                         back + offsetof(typename Block::Back, q8t));
    if constexpr (kBacks == 1) {
      __syncthreads();
      if (left > 1) b.load_back(0, now.row);
      arch::cp_async_commit();
    }
    b.add_queries(row, one_scale() ? tile_scales + 16 : b.query_rows_of(maxima + Block::kQuery),
                  query_codes);
    if constexpr (Block::kWithStart) b.count_starts(maxima, left);
    if (kMixed || left > 1) {
      if constexpr (!kMixed) b.probabilities(prob, stage);
      if (masked(now)) b.hide(prob, now.query);
    }
  }
  arch::cp_async_wait<0>();
  if constexpr (Block::kWithStart) {
    __syncthreads();
    b.take_starts_off(0);
  }
  b.finish();
}

/// Thread blocks on a multiprocessor: they share its registers.
template <class Shape>
inline constexpr int kFusedResident = arch::resident(sizeof(FusedShared<Shape>), Shape::kResident);

/// Larger: the shape that is taken instead where it fits.
template <typename T, class Shape, class Larger>
__global__ void __launch_bounds__(Shape::kThreads, kFusedResident<Shape>)
    fused_kernel(const __grid_constant__ BackwardParams p) {
  constexpr std::size_t larger = std::is_same_v<Shape, Larger> ? 0 : sizeof(FusedShared<Larger>);
  if constexpr (arch::runs_here(sizeof(FusedShared<Shape>), larger)) fused<T, Shape>(p);
}

}  // namespace sagebwd::cuda::sm80
