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
//   dP, y, largest magnitudes → [barrier] → codes → [barrier] → dV, dK, dQ, then S and P of the
//   next tile
// With three stages of query tiles those two barriers also protect the ring. With two, only what dV
// and dK read is doubled, and a third barrier stands before S.
#pragma once

#include <cstddef>

#include "cuda/arch/global_add.cuh"
#include "cuda/arch/mma_sync.cuh"
#include "cuda/arch/transpose.cuh"
#include "cuda/sm80/bwd/fused_shape.cuh"
#include "cuda/tile/codes.cuh"
#include "cuda/tile/convert.cuh"
#include "cuda/tile/sequence.cuh"
#include "cuda/tile/shared_tile.cuh"
#include "numerics/quantize.h"

namespace sagebwd::cuda::sm80 {

template <typename T, class Shape>
struct FusedBlock {
  using Shared = FusedShared<Shape>;
  static constexpr int D = Shape::D, kM = Shape::kM, kShare = Shape::kShare;
  static constexpr int kTileQ = Shape::kTileQ, kTileK = Shape::kTileK;
  static constexpr int kThreads = Shape::kThreads, kMyQueries = Shape::kMyQueries;
  static constexpr int kQueryBlocks = Shape::kQueryBlocks;
  static constexpr int kChannels = Shape::kChannels, kChannelBlocks = Shape::kChannelBlocks;
  // Scales below this are this: nothing real is that small, and its reciprocal is finite.
  static constexpr float kSmallest = 0x1p-120f;
  using Scores = float[kM][kQueryBlocks][4];
  using Rows = float[kM][2];                        // [block of 16 keys][0: row g, 1: row g + 8]
  using Codes = uint32_t[kM][kQueryBlocks / 2][2];  // half a contraction step: rows g and g + 8

  const BackwardParams& p;
  tile::Sequence s;
  int kv_head;
  uint32_t thread;
  int key0;  // first key of the block, inside the sequence
  tile::Band band;
  uint8_t* memory;                 // of Shared
  uint32_t base;                   // its address
  uint32_t a8, b8, a16, b16, b_t;  // the lane's part of fragment addresses
  float dk[kM][kChannelBlocks][4], dv[kM][kChannelBlocks][4];

  __device__ FusedBlock(const BackwardParams& params, uint8_t* shared, int block)
      : p(params), s(tile::sequence_of_block(params.seq, block * kTileK / kBlock, false)) {
    kv_head = static_cast<int>(blockIdx.y);
    // By way of a shuffle, or the compiler would ask for the slow special register again and again.
    thread = __shfl_sync(0xffffffffu, threadIdx.x, static_cast<int>(threadIdx.x % 32));
    memory = shared, base = arch::shared_address(shared);
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
    load_16<kTileK>(base + offsetof(Shared, v16), static_cast<const T*>(p.v16) + row * D, p.v,
                    kv_head, s.k_begin + key0, s.nk - key0);
    tile::load_linear<kTileK * 8, kThreads>(base + offsetof(Shared, k_scale), p.k_scale + row,
                                            thread);
    tile::load_tile<D*(kTileK / kGroup), kGroup, kThreads>(base + offsetof(Shared, k8t),
                                                           p.k8t + row * D, thread);
    reset(0);
    reset(1);
  }

  template <typename V>
  __device__ V& at(uint32_t address) const {
    return *reinterpret_cast<V*>(memory + (address - base));
  }

  // Where things are.
  using Front = typename Shared::Front;
  using Back = typename Shared::Back;
  __device__ static constexpr uint32_t front_at(int stage) {
    return static_cast<uint32_t>(offsetof(Shared, front) +
                                 (Shared::kFronts > 1 ? stage * sizeof(Front) : 0));
  }
  __device__ static constexpr uint32_t back_at(int stage) {
    return static_cast<uint32_t>(offsetof(Shared, back) + stage * sizeof(Back));
  }
  __device__ uint32_t maxima_at(int buffer) const {
    return base + static_cast<uint32_t>(offsetof(Shared, maxima) +
                                        buffer * sizeof(typename Shared::Maxima));
  }
  static constexpr uint32_t kP = offsetof(typename Shared::Maxima, p),
                            kDs = offsetof(typename Shared::Maxima, ds),
                            kQuery = offsetof(typename Shared::Maxima, query);
  static constexpr uint32_t kPCodes = offsetof(Shared, p_codes),
                            kDsCodes = offsetof(Shared, ds_codes);

  __device__ uint32_t warp() const { return thread / 32; }
  __device__ uint32_t lane() const { return thread % 32; }
  __device__ uint32_t t() const { return thread % 4; }
  __device__ uint32_t group() const { return warp() / kShare; }
  __device__ uint32_t member() const { return warp() % kShare; }
  /// What follows from these numbers is worked out again in every round of the loop: held in
  /// registers all the time it would push accumulators out of them.
  __device__ void new_round() {
    if constexpr (D == 64) return;
    arch::keep(thread);
    arch::keep(a8), arch::keep(b8), arch::keep(a16), arch::keep(b16), arch::keep(b_t);
  }

  __device__ int my_row(int m, int r) const {
    return static_cast<int>(group() * 16 * kM + lane() / 4) + 16 * m + 8 * r;
  }
  /// Read anew in every round: registers are scarcer than loads.
  __device__ void key_scales(float2 (&scale)[kM][2]) const {
#pragma unroll
    for (int m = 0; m < kM; ++m)
#pragma unroll
      for (int r = 0; r < 2; ++r)
        scale[m][r] = at<float2>(base + offsetof(Shared, k_scale) + my_row(m, r) * 8);
  }
  __device__ uint32_t my_queries() const { return member() * kMyQueries; }

  __device__ void reset(int buffer) {
    constexpr uint32_t kCount = sizeof(typename Shared::Maxima) / 4;
#pragma unroll
    for (uint32_t i = 0; i < kCount; i += kThreads)
      if (kCount % kThreads == 0 || i + thread < kCount)
        at<float>(maxima_at(buffer) + (i + thread) * 4) = kSmallest;
  }

  /// Rows of V or dO, from the caller's tensor where that is possible. At d 128 it never is: the
  /// addresses would take registers from the accumulators.
  template <int kRows>
  __device__ void load_16(uint32_t to, const T* padded, const Strided& x, int head, int64_t token,
                          int valid) const {
    if constexpr (D == 64)
      tile::load_rows<kRows, 2 * D, kThreads>(
          to, p.direct ? tile::row_of<const T>(x, s, head, token) : padded,
          p.direct ? x.token * 2 : D * 2, p.direct ? valid : kRows, thread);
    else
      tile::load_tile<kRows, 2 * D, kThreads>(to, padded, thread);
  }

  __device__ void load(int stage, int head, int query0) {
    const uint32_t front = base + front_at(stage), back = base + back_at(stage);
    const int64_t row = head * p.tq + s.q_pad + query0;
    tile::load_tile<kTileQ, D, kThreads>(front + offsetof(Front, q8), p.q8 + row * D, thread);
    load_16<kTileQ>(front + offsetof(Front, do16), static_cast<const T*>(p.do16) + row * D, p.dout,
                    head, s.q_begin + query0, s.nq - query0);
    tile::load_tile<D*(kTileQ / kGroup), kGroup, kThreads>(back + offsetof(Back, q8t),
                                                           p.q8t + row * D, thread);
    tile::load_tile<D*(kTileQ / kGroup), kGroup, kThreads>(back + offsetof(Back, do8t),
                                                           p.do8t + row * D, thread);
    tile::load_linear<kTileQ * 8, kThreads>(front + offsetof(Front, exponent), p.q_exponent + row,
                                            thread);
    tile::load_linear<kTileQ * 8, kThreads>(front + offsetof(Front, gradient), p.q_gradient + row,
                                            thread);
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
    float2 key[kM][2];
    key_scales(key);
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
              fmaf(tile::scaled_sum(acc[m][n][e], key[m][e >> 1].x, key[m][e >> 1].y),
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
    float2 key[kM][2];
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
          y[m][n][e] = prob[m][n][e] * key[m][e >> 1].x *
                       fmaf(y[m][n][e], e & 1 ? q.z : q.x, e & 1 ? q.w : q.y);
    }
  }

  /// Scale of each key from this warp's queries: of P, which is not negative, so that its order is
  /// that of its bits (NaN on top), and of y.
  __device__ void p_scales(Rows& scale, const Scores& x) const {
#pragma unroll
    for (int m = 0; m < kM; ++m)
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        int top = __float_as_int(kSmallest * numerics::kUnsignedLevels);
#pragma unroll
        for (int n = 0; n < kQueryBlocks; ++n)
          top =
              __vimax3_s32(top, __float_as_int(x[m][n][2 * r]), __float_as_int(x[m][n][2 * r + 1]));
        scale[m][r] = tile::quad_max_nan(__int_as_float(top)) * p.p_unit;
      }
  }
  __device__ static void ds_scales(Rows& scale, const Scores& x) {
#pragma unroll
    for (int m = 0; m < kM; ++m)
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        float top = kSmallest * numerics::kLevels;
#pragma unroll
        for (int n = 0; n < kQueryBlocks; ++n)
#pragma unroll
          for (int e = 2 * r; e < 2 * r + 2; ++e) top = arch::max_nan(top, fabsf(x[m][n][e]));
        scale[m][r] = tile::quad_max_nan(top) * (1.0f / numerics::kLevels);
      }
  }

  /// Hands this warp's scales of keys to the warps that share them.
  __device__ void share(uint32_t maxima, const Rows& scale) const {
    if (t() != 0) return;
#pragma unroll
    for (int m = 0; m < kM; ++m)
#pragma unroll
      for (int r = 0; r < 2; ++r)
        atomicMax(&at<uint32_t>(maxima + my_row(m, r) * 4), __float_as_uint(scale[m][r]));
  }
  __device__ void shared_scales(Rows& scale, uint32_t maxima) const {
#pragma unroll
    for (int m = 0; m < kM; ++m)
#pragma unroll
      for (int r = 0; r < 2; ++r) scale[m][r] = at<float>(maxima + my_row(m, r) * 4);
  }

  template <int kHalf, int kCount>
  __device__ void halve(float (&top)[kCount], uint32_t bit) const {
    const bool upper = (lane() & bit) != 0;
#pragma unroll
    for (int c = 0; c < kHalf; ++c) {
      const float keep = upper ? top[c + kHalf] : top[c], give = upper ? top[c] : top[c + kHalf];
      top[c] = arch::max_nan(keep, __shfl_xor_sync(0xffffffffu, give, bit));
    }
  }

  /// Scale of each query from this warp's keys: eight lanes hold a column. In each step a lane
  /// keeps half of its columns and gives the other half away.
  __device__ void share_query_scales(uint32_t maxima, const Scores& y) const {
    constexpr int kColumns = 2 * kQueryBlocks;
    float top[kColumns];
#pragma unroll
    for (int c = 0; c < kColumns; ++c) {
      top[c] = 0.0f;
#pragma unroll
      for (int m = 0; m < kM; ++m)
        top[c] = m == 0 ? arch::max_nan(fabsf(y[m][c / 2][c % 2]), fabsf(y[m][c / 2][c % 2 + 2]))
                        : arch::max_nan(top[c], arch::max_nan(fabsf(y[m][c / 2][c % 2]),
                                                              fabsf(y[m][c / 2][c % 2 + 2])));
    }
    halve<kColumns / 2>(top, 16);
    halve<kColumns / 4>(top, 8);
    halve<kColumns / 8>(top, 4);  // one is left
    const uint32_t column = lane() / 16 % 2 * 4 + lane() / 8 % 2 * 2 + lane() / 4 % 2;
    atomicMax(&at<uint32_t>(maxima + (my_queries() + column / 2 * 8 + 2 * t() + column % 2) * 4),
              __float_as_uint(top[0] * (1.0f / numerics::kLevels)));
  }

  __device__ static void quantize(Codes& codes, const Scores& x, const Rows& scale) {
#pragma unroll
    for (int m = 0; m < kM; ++m)
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        const float inverse = arch::reciprocal_approx(scale[m][r]);
#pragma unroll
        for (int n = 0; n < kQueryBlocks; n += 2)
          codes[m][n / 2][r] = tile::pack(
              tile::code(x[m][n][2 * r], inverse), tile::code(x[m][n][2 * r + 1], inverse),
              tile::code(x[m][n + 1][2 * r], inverse), tile::code(x[m][n + 1][2 * r + 1], inverse));
      }
  }

  /// Hands this warp's codes to the warp that shares its keys.
  __device__ void put_codes(uint32_t to, const Codes& codes) const {
#pragma unroll
    for (int m = 0; m < kM; ++m)
      at<uint4>(operand_at(to, member(), m) + lane() * 16) =
          make_uint4(codes[m][0][0], codes[m][0][1], codes[m][1][0], codes[m][1][1]);
  }
  __device__ uint32_t operand_at(uint32_t codes, uint32_t step, int m) const {
    return base + codes + ((group() * (kTileQ / 32) + step) * kM + m) * 512;
  }
  __device__ void get_codes(uint32_t (&a)[4], uint32_t operand) const {
    const uint4 v = at<uint4>(operand + lane() * 16);
    a[0] = v.x, a[1] = v.y, a[2] = v.z, a[3] = v.w;
  }

  /// Codes of y with one scale per query, as A operands with queries as rows.
  __device__ void put_query_codes(const Scores& y, uint32_t maxima) const {
    const uint32_t scale = maxima + (my_queries() + 2 * t()) * 4;
#pragma unroll
    for (int n = 0; n < kQueryBlocks; n += 2) {
      uint32_t a[kM][2];
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        const float2 two = at<float2>(scale + (n + h) * 32);
        const float i0 = arch::reciprocal_approx(two.x), i1 = arch::reciprocal_approx(two.y);
#pragma unroll
        for (int m = 0; m < kM; ++m) {
          const float(&v)[4] = y[m][n + h];
          a[m][h] = arch::transpose_8x8(tile::pack(tile::code(v[0], i0), tile::code(v[2], i0),
                                                   tile::code(v[1], i1), tile::code(v[3], i1)));
        }
      }
      at<uint4>(query_codes_at(my_queries() / 16 + n / 2, group()) + lane() * 16) =
          make_uint4(a[0][0], a[0][1], a[1][0], a[1][1]);
    }
  }
  __device__ uint32_t query_codes_at(uint32_t block, uint32_t step) const {
    return base + static_cast<uint32_t>(offsetof(Shared, query_codes)) +
           (block * (kTileK / 32) + step) * 512;
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

  /// dQ·lane += codes·K8 of 32 queries and this warp's share of the channels.
  __device__ void add_queries(int head, int query0, uint32_t maxima) const {
    const uint32_t pair = warp() % Shape::kDqPairs,
                   first = warp() / Shape::kDqPairs * Shape::kDqBlocks;
    constexpr int kBlocks = Shape::kDqBlocks < 4 ? Shape::kDqBlocks : 4;
    float scale[2][2], offset[2][2];
#pragma unroll
    for (int j = 0; j < 2; ++j)
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        // 22 significant bits, so that the offset is exact.
        scale[j][r] = __uint_as_float(
            __float_as_uint(at<float>(maxima + (pair * 32 + j * 16 + r * 8 + lane() / 4) * 4)) &
            0xfffffffcu);
        offset[j][r] = -tile::kMagicFloat * scale[j][r];
      }
    const uint32_t k8t = base + offsetof(Shared, k8t) + first * 8 * kGroup + b_t;
    float* out = p.dq_sum + (head * p.tq + s.q_pad + query0 + pair * 32) * D + first * 128;
#pragma unroll
    for (int part = 0; part < Shape::kDqBlocks; part += kBlocks) {
      int sum[2][kBlocks][4];
#pragma unroll
      for (int k = 0; k < kTileK / 32; k += 2) {
        uint32_t a[2][2][4];
#pragma unroll
        for (int j = 0; j < 2; ++j) {
          get_codes(a[j][0], query_codes_at(pair * 2 + j, k));
          get_codes(a[j][1], query_codes_at(pair * 2 + j, k + 1));
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
#pragma unroll
    for (int m = 0; m < kM; ++m)
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        const int key = key0 + my_row(m, r);
        if (key >= s.nk) continue;
        const float factor = kLn2 / at<float>(base + offsetof(Shared, k_scale) + my_row(m, r) * 8);
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
  constexpr int kTileQ = Shape::kTileQ, kTileK = Shape::kTileK, kStages = Shape::kStages;
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
  const int steps = per_head * p.group;

  /// A tile of queries on its way round.
  struct Cursor {
    int head, query, stage;
  };
  const auto advance = [&](Cursor& c) {
    c.query += kTileQ;
    if (c.query >= first + per_head * kTileQ) c.query = first, ++c.head;
    c.stage = c.stage + 1 == kStages ? 0 : c.stage + 1;
  };
  const auto masked = [&](const Cursor& c) { return c.query < whole_begin || c.query > whole_end; };
  Cursor now{b.kv_head * p.group, first, 0}, next = now;
  int to_load = steps;
  const auto load_next = [&] {
    if (to_load > 0) {
      b.load(next.stage, next.head, next.query);
      advance(next);
      --to_load;
    }
    arch::cp_async_commit();
  };

  load_next();
  if constexpr (kStages == 3) load_next();
  arch::cp_async_wait<kStages == 3 ? 1 : 0>();
  __syncthreads();
  typename Block::Scores prob;
  if (steps > 0) {
    b.probabilities(prob, now.stage);
    if (masked(now)) b.hide(prob, now.query);
  }
  for (int i = 0; i < steps; ++i) {
    b.new_round();
    const uint32_t maxima = b.maxima_at(i & 1);
    typename Block::Rows scale;
    {
      typename Block::Scores y;
      typename Block::Codes codes;
      b.gradients(y, prob, now.stage);
      if (masked(now)) b.hide(y, now.query);
      b.p_scales(scale, prob);
      b.share(maxima + Block::kP, scale);
      Block::ds_scales(scale, y);
      b.share(maxima + Block::kDs, scale);
      b.share_query_scales(maxima + Block::kQuery, y);
      __syncthreads();
      if constexpr (kStages > 1) load_next();
      b.reset((i + 1) & 1);
      b.shared_scales(scale, maxima + Block::kP);
      Block::quantize(codes, prob, scale);
      b.put_codes(Block::kPCodes, codes);
      b.shared_scales(scale, maxima + Block::kDs);
      Block::quantize(codes, y, scale);
      b.put_codes(Block::kDsCodes, codes);
      b.put_query_codes(y, maxima + Block::kQuery);
    }
    if constexpr (kStages == 3) arch::cp_async_wait<1>();
    __syncthreads();
    const uint32_t back = Block::back_at(now.stage);
    b.shared_scales(scale, maxima + Block::kP);
    b.template multiply<tile::Bytes::u8>(b.dv, Block::kPCodes, scale,
                                         back + offsetof(typename Block::Back, do8t));
    b.shared_scales(scale, maxima + Block::kDs);
    b.template multiply<tile::Bytes::s8>(b.dk, Block::kDsCodes, scale,
                                         back + offsetof(typename Block::Back, q8t));
    const Cursor last = now;
    advance(now);
    if constexpr (kStages == 1) {
      __syncthreads();
      load_next();
    }
    if constexpr (kStages < 3) {
      arch::cp_async_wait<0>();
      __syncthreads();
    }
    // Behind the last tile this works on what lies there, to no effect.
    b.probabilities(prob, now.stage);
    b.add_queries(last.head, last.query, maxima + Block::kQuery);
    if (masked(now)) b.hide(prob, now.query);
  }
  arch::cp_async_wait<0>();
  b.finish();
}

}  // namespace sagebwd::cuda::sm80
