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

#include "cuda/arch/global_add.cuh"
#include "cuda/arch/mma_sync.cuh"
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
      Lane::operand_at, Lane::query_codes_at, Lane::get_codes;
  using typename Lane::Rows, typename Lane::Scores, typename Lane::Shared, typename Lane::Front,
      typename Lane::Back, typename Lane::Columns;
  static constexpr int D = Shape::D, kM = Shape::kM;
  static constexpr int kTileQ = Shape::kTileQ, kTileK = Shape::kTileK;
  static constexpr int kThreads = Shape::kThreads, kQueryBlocks = Shape::kQueryBlocks;
  static constexpr int kChannels = Shape::kChannels, kChannelBlocks = Shape::kChannelBlocks;
  using Codes = uint32_t[kM][kQueryBlocks / 2][2];  // half a contraction step: rows g and g + 8

  const BackwardParams& p;
  tile::Sequence s;
  int kv_head;
  int key0;  // first key of the block, inside the sequence
  tile::Band band;
  uint32_t a8, b8, a16, b16, b_t;  // the lane's part of fragment addresses
  const char* dout;     // d 64: this thread's first chunk of dO of the next tile to load,
  int64_t dout_stride;  // and bytes from row to row
  float dk[kM][kChannelBlocks][4], dv[kM][kChannelBlocks][4];

  __device__ FusedBlock(const BackwardParams& params, uint8_t* shared, int block)
      : Lane(shared),
        p(params),
        s(tile::sequence_of_block(params.seq, block * kTileK / kBlock, false)) {
    kv_head = static_cast<int>(blockIdx.y);
    const int64_t padded = static_cast<int64_t>(block) * kTileK, row = kv_head * p.tk + padded;
    key0 = static_cast<int>(padded - s.k_pad);
    band = tile::band_of(p.mask, s);
    a8 = tile::a_lane<D>(lane()), b8 = tile::b_lane<D>(lane());
    a16 = tile::a_lane<2 * D>(lane()), b16 = tile::b_lane<2 * D>(lane());
    b_t = tile::swizzled<kGroup>(lane() & 7, lane() >> 3);
#pragma unroll
    for (int m = 0; m < kM; ++m) {
#pragma unroll
      for (int c = 0; c < kChannelBlocks; ++c)
#pragma unroll
        for (int e = 0; e < 4; ++e) dk[m][c][e] = dv[m][c][e] = 0.0f;
    }
    tile::load_tile<kTileK, D, kThreads>(base + offsetof(Shared, k8), p.k8 + row * D, thread);
    load_values(static_cast<const T*>(p.v16) + row * D);
    dout_stride = p.direct ? p.dout.token * 2 : D * 2;
    if (thread < kTileK)
      at<float>(base + offsetof(Shared, k_scale) + row_at(thread) * 4) =
          p.k_scale[row + thread].scale;
    tile::load_tile<D*(kTileK / kGroup), kGroup, kThreads>(base + offsetof(Shared, k8t),
                                                           p.k8t + row * D, thread);
    this->reset(0);
    this->reset(1);
  }

  template <typename V>
  __device__ V& at(uint32_t address) const {
    return Lane::template at<V>(address);
  }

  /// What follows from these numbers is worked out again in every round of the loop: held in
  /// registers all the time it would push accumulators out of them.
  __device__ void new_round() {
    if constexpr (D == 64) return;
    arch::keep(thread);
    arch::keep(a8), arch::keep(b8), arch::keep(a16), arch::keep(b16), arch::keep(b_t);
  }

  /// Rows of V, from the caller's tensor where that is possible. At d 128 it never is.
  __device__ void load_values(const T* padded) const {
    const uint32_t to = base + offsetof(Shared, v16);
    if constexpr (D == 64)
      tile::load_rows<kTileK, 2 * D, kThreads>(
          to, p.direct ? tile::row_of<const T>(p.v, s, kv_head, s.k_begin + key0) : padded,
          p.direct ? p.v.token * 2 : D * 2, p.direct ? s.nk - key0 : kTileK, thread);
    else
      tile::load_tile<kTileK, 2 * D, kThreads>(to, padded, thread);
  }

  /// The tiles to load are those of `head` from query0 on. At d 64 dO is read from the caller's
  /// tensor where that is possible.
  __device__ void start_head(int head, int query0) {
    if constexpr (D == 64) {
      constexpr int kChunks = 2 * D / 16;
      const T* first = p.direct
                           ? tile::row_of<const T>(p.dout, s, head, s.q_begin + query0)
                           : static_cast<const T*>(p.do16) + (head * p.tq + s.q_pad + query0) * D;
      dout = reinterpret_cast<const char*>(first) + thread / kChunks * dout_stride +
             thread % kChunks * 16;
    }
  }

  /// Starts loading the next tile of queries; `row` is its first in the workspace.
  __device__ void load_front(int stage, uint32_t row, int query0) {
    const uint32_t front = base + front_at(stage);
    tile::load_tile<kTileQ, D, kThreads>(front + offsetof(Front, q8),
                                         p.q8 + static_cast<uint64_t>(row) * D, thread);
    // Two queries to a chunk: half of the threads that are needed take exponents, half gradients.
    static_assert(offsetof(Front, gradient) == offsetof(Front, exponent) + kTileQ * 8);
    const void* from = thread < kTileQ / 2 ? static_cast<const void*>(p.q_exponent)
                                           : static_cast<const void*>(p.q_gradient);
    arch::cp_async_16_if(
        thread < kTileQ, front + offsetof(Front, exponent) + thread * 16,
        static_cast<const char*>(from) + row * uint64_t{8} + thread % (kTileQ / 2) * 16);
    if constexpr (D == 64)
      load_dout(front + offsetof(Front, do16), query0);
    else
      tile::load_tile<kTileQ, 2 * D, kThreads>(
          front + offsetof(Front, do16),
          static_cast<const T*>(p.do16) + static_cast<uint64_t>(row) * D, thread);
  }
  __device__ void load_back(int stage, uint32_t row) const {
    const uint32_t back = base + back_at(stage);
    const uint64_t first = static_cast<uint64_t>(row) * D;
    tile::load_tile<D*(kTileQ / kGroup), kGroup, kThreads>(back + offsetof(Back, q8t),
                                                           p.q8t + first, thread);
    tile::load_tile<D*(kTileQ / kGroup), kGroup, kThreads>(back + offsetof(Back, do8t),
                                                           p.do8t + first, thread);
  }

  __device__ void load_dout(uint32_t to, int query0) {
    constexpr int kChunks = 2 * D / 16, kPerPass = kThreads / kChunks;
    const int row = static_cast<int>(thread / kChunks),
              valid = p.direct ? min(s.nq - query0, kTileQ) : kTileQ;
    to += tile::chunk_at<2 * D>(thread);
    if (valid == kTileQ) {
#pragma unroll
      for (int i = 0; i < kTileQ / kPerPass; ++i, dout += kPerPass * dout_stride)
        arch::cp_async_16(to + i * kThreads * 16, dout);
    } else {
#pragma unroll
      for (int i = 0; i < kTileQ / kPerPass; ++i, dout += kPerPass * dout_stride)
        arch::cp_async_16_or_zero(to + i * kThreads * 16, dout, row + i * kPerPass < valid);
    }
  }

  /// Zeroes what the mask hides.
  __device__ void hide(Scores& x, int query0) const {
    // How far the key lies inside the band of the query.
    const int inside = key0 - query0 - static_cast<int>(my_queries() + 2 * t()) - band.begin;
#pragma unroll
    for (int m = 0; m < kM; ++m)
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        const int row = my_row(m, r);
        const uint32_t here = static_cast<uint32_t>(inside + row);
        const uint32_t width = key0 + row < s.nk ? band.width() : 0;
#pragma unroll
        for (int n = 0; n < kQueryBlocks; ++n)
#pragma unroll
          for (int e = 0; e < 2; ++e)
            if (here - n * 8 - e >= width) x[m][n][2 * r + e] = 0.0f;
      }
  }

  // Operands of one contraction step from this warp's keys.
  __device__ uint32_t key_address(int m, int k) const {
    return tile::step_of(base + offsetof(Shared, k8) + group() * 16 * kM * D + a8, k) + m * 16 * D;
  }
  __device__ uint32_t value_address(int m, int k) const {
    return tile::step_of(base + offsetof(Shared, v16) + group() * 32 * kM * D + a16, k) +
           m * 32 * D;
  }

  /// φ·P: the values whose codes go into dV.
  __device__ void probabilities(Scores& x, int stage) const {
    const uint32_t q8 = base + front_at(stage) + offsetof(Front, q8) + my_queries() * D + b8;
    int acc[kM][kQueryBlocks][4];
#pragma unroll
    for (int k = 0; k < D / 32; ++k) {
      uint32_t a[kM][4], b[kQueryBlocks / 2][4];
#pragma unroll
      for (int m = 0; m < kM; ++m) arch::ldmatrix_x4(a[m], key_address(m, k));
#pragma unroll
      for (int n = 0; n < kQueryBlocks / 2; ++n)
        arch::ldmatrix_x4(b[n], tile::step_of(q8, k) + n * 16 * D);
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
    const uint32_t do16 =
        base + front_at(stage) + offsetof(Front, do16) + my_queries() * 2 * D + b16;
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
        arch::ldmatrix_x4(b[n], tile::step_of(do16, k) + n * 32 * D);
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
  /// Codes of y with one scale per query, as A operands with queries as rows.
  __device__ void put_query_codes(const Scores& y, const Columns& inverse) const {
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
    }
  }
  /// acc += scale·codes·B, B transposed in shared memory.
  template <tile::Bytes kA>
  __device__ void multiply(float (&acc)[kM][kChannelBlocks][4], uint32_t codes, const Rows& scale,
                           uint32_t transposed) const {
    constexpr int kAll = kTileQ / 32;
    uint32_t a[kM][kAll][4];
#pragma unroll
    for (int m = 0; m < kM; ++m)
#pragma unroll
      for (int k = 0; k < kAll; ++k) get_codes(a[m][k], operand_at(codes, k, m));
    if constexpr (D == 64) {  // two blocks of channels at a time, and the compiler's own order
      const uint32_t b = base + transposed + member() * kChannels * kGroup + b_t;
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
              acc[m][c + h][e] =
                  fmaf(tile::sum_of(sum[h][m][e]), scale[m][e >> 1], acc[m][c + h][e]);
      }
    } else {
      // In flight: the operand of the next block of channels, the products of this one, and the
      // sums of the last on their way to FP32. The fences keep the compiler from undoing that.
      const uint32_t b = base + transposed + member() * kChannels * kGroup + b_t;
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
              acc[m][c - 1][e] =
                  fmaf(tile::sum_of(sum[(c - 1) & 1][m][e]), scale[m][e >> 1], acc[m][c - 1][e]);
      }
    }
  }

  /// dQ·lane += codes·K8 of 32 queries and this warp's share of the channels; `row` is the tile's
  /// first in the workspace.
  __device__ void add_queries(uint32_t row, uint32_t maxima) const {
    const uint32_t pair = warp() % Shape::kDqPairs,
                   first = warp() / Shape::kDqPairs * Shape::kDqBlocks;
    constexpr int kBlocks = Shape::kDqBlocks < 4 ? Shape::kDqBlocks : 4;
    const float4 four = at<float4>(maxima + pair * 128 + lane() / 4 * 16);
    float scale[2][2] = {{four.x, four.y}, {four.z, four.w}}, offset[2][2];
#pragma unroll
    for (int j = 0; j < 2; ++j)
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        // 22 significant bits, so that the offset is exact.
        scale[j][r] = __uint_as_float(__float_as_uint(scale[j][r]) & 0xfffffffcu);
        offset[j][r] = -tile::kMagicFloat * scale[j][r];
      }
    const uint32_t k8t = base + offsetof(Shared, k8t) + first * 8 * kGroup + b_t;
    float* out = p.dq_sum + static_cast<uint64_t>(row) * D + (pair * 32 * D + first * 128);
#pragma unroll
    for (int part = 0; part < Shape::kDqBlocks; part += kBlocks) {
      int sum[2][kBlocks][4];
#pragma unroll
      for (int k = 0; k < kTileK / 32; k += 2) {
        uint32_t a[2][2][4];
#pragma unroll
        for (int j = 0; j < 2; ++j) {
          get_codes(a[j][0], query_codes_at(pair, j, k));
          get_codes(a[j][1], query_codes_at(pair, j, k + 1));
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
__global__ void __launch_bounds__(Shape::kThreads, Shape::kResident)
    fused_kernel(const __grid_constant__ BackwardParams p) {
  using Block = FusedBlock<T, Shape>;
  constexpr int kTileQ = Shape::kTileQ, kTileK = Shape::kTileK, kBacks = Shape::kBacks;
  extern __shared__ __align__(128) uint8_t memory[];
  // The first keys of a causal sequence have the most queries, and the grid starts with them.
  Block b(p, memory, static_cast<int>(blockIdx.x));

  if (b.key0 >= b.s.nk) {  // the padding of a sequence
    arch::cp_async_wait<0>();
    return;
  }

  const int last_key = min(b.key0 + kTileK, b.s.nk) - 1;
  const tile::QueryRange range = tile::visible_to(p.mask, b.s, b.key0, last_key);
  const tile::QueryRange of_first = tile::visible_to(p.mask, b.s, b.key0, b.key0);
  const tile::QueryRange of_last = b.key0 + kTileK <= b.s.nk
                                       ? tile::visible_to(p.mask, b.s, last_key, last_key)
                                       : tile::QueryRange{0, 0};
  const int whole_begin = max(of_first.begin, of_last.begin),
            whole_end = min(of_first.end, of_last.end) - kTileQ;
  const int first = range.begin / kTileQ * kTileQ;
  const int per_head = range.begin < range.end ? (range.end - first + kTileQ - 1) / kTileQ : 0;
  const int end = first + per_head * kTileQ, steps = per_head * p.group;
  const int first_head = b.kv_head * p.group;

  /// A tile of queries: the first one's place in the sequence and in the workspace.
  struct Tile {
    int query;
    uint32_t row;
  };
  const auto masked = [&](const Tile& c) { return c.query < whole_begin || c.query > whole_end; };
  const uint32_t next_head = static_cast<uint32_t>(p.tq - per_head * kTileQ);
  Tile loading{first, static_cast<uint32_t>(first_head * p.tq + b.s.q_pad + first)};
  int head = first_head, to_load = steps, load_stage = 0;
  b.start_head(head, first);
  // Starts loading a tile and says which; behind the last, nothing.
  const auto load_next = [&](bool back) {
    const Tile tile = loading;
    if (to_load > 0) {
      b.load_front(load_stage, tile.row, tile.query);
      if (back) b.load_back(load_stage, tile.row);
      load_stage = load_stage + 1 == kBacks ? 0 : load_stage + 1;
      --to_load;
      loading.query += kTileQ, loading.row += kTileQ;
      if (loading.query >= end) {
        loading.query = first, loading.row += next_head;
        if (to_load > 0) b.start_head(++head, first);
      }
    }
    arch::cp_async_commit();
    return tile;
  };

  Tile now = load_next(true), next = now;
  if constexpr (kBacks == 3) next = load_next(true);
  int stage = 0;
  arch::cp_async_wait<kBacks == 3 ? 1 : 0>();
  __syncthreads();
  typename Block::Scores prob;
  if (steps > 0) {
    b.probabilities(prob, stage);
    if (masked(now)) b.hide(prob, now.query);
  }
  for (int i = 0; i < steps; ++i) {
    b.new_round();
    const uint32_t maxima = b.maxima_at(i & 1);
    Tile after;
    {
      typename Block::Scores y;
      b.gradients(y, prob, stage);
      if (masked(now)) b.hide(y, now.query);
      b.share_p_scales(maxima + Block::kP, prob, p.p_unit);
      b.share_ds_scales(maxima + Block::kDs, y);
      b.share_query_scales(maxima + Block::kQuery, y);
      __syncthreads();
      after = load_next(kBacks > 1);
      b.reset((i + 1) & 1);
      // All at once: one wait for shared memory and reciprocals instead of three.
      typename Block::Rows p_inverse, ds_inverse;
      typename Block::Columns query_inverse;
      b.row_inverses(p_inverse, maxima + Block::kP);
      b.row_inverses(ds_inverse, maxima + Block::kDs);
      b.query_inverses(query_inverse, maxima + Block::kQuery);
      typename Block::Codes codes;
      Block::template quantize<tile::Bytes::u8>(codes, prob, p_inverse);
      b.put_codes(Block::kPCodes, codes);
      Block::template quantize<tile::Bytes::s8>(codes, y, ds_inverse);
      b.put_codes(Block::kDsCodes, codes);
      b.put_query_codes(y, query_inverse);
    }
    arch::cp_async_wait<kBacks == 3 ? 1 : 0>();
    __syncthreads();
    const uint32_t back = Block::back_at(stage), row = now.row;
    now = kBacks == 3 ? next : after, next = after;
    stage = stage + 1 == kBacks ? 0 : stage + 1;
    // Behind the last tile this works on what lies there, to no effect.
    b.probabilities(prob, stage);
    typename Block::Rows scale;
    b.get_rows(scale, maxima + Block::kP);
    b.template multiply<tile::Bytes::u8>(b.dv, Block::kPCodes, scale,
                                         back + offsetof(typename Block::Back, do8t));
    b.get_rows(scale, maxima + Block::kDs);
    b.template multiply<tile::Bytes::s8>(b.dk, Block::kDsCodes, scale,
                                         back + offsetof(typename Block::Back, q8t));
    if constexpr (kBacks == 1) {
      __syncthreads();
      if (i + 1 < steps) b.load_back(0, now.row);
      arch::cp_async_commit();
    }
    b.add_queries(row, maxima + Block::kQuery);
    if (masked(now)) b.hide(prob, now.query);
  }
  arch::cp_async_wait<0>();
  b.finish();
}

}  // namespace sagebwd::cuda::sm80
