// SPDX-License-Identifier: Apache-2.0
// P and dS of a tile in the fused backward: products of K with Q and of V with dO, keys being rows.
#pragma once

#include <cstddef>

#include "cuda/arch/mma_sync.cuh"
#include "cuda/arch/scalar.cuh"
#include "cuda/sm80/bwd/fused/registers.cuh"
#include "cuda/sm80/bwd/fused/scales.cuh"
#include "cuda/tile/codes.cuh"
#include "cuda/tile/sequence.cuh"
#include "cuda/tile/shared_tile.cuh"

namespace sagebwd::cuda::sm80 {

template <typename T, class Shape>
struct FusedScores : FusedScales<Shape> {
  using Lane = FusedScales<Shape>;
  using Lane::base, Lane::lane, Lane::t, Lane::group, Lane::my_row, Lane::my_queries,
      Lane::key_scales, Lane::front_at, Lane::work;
  using typename Lane::Rows, typename Lane::Scores, typename Lane::Shared, typename Lane::Front;
  static constexpr int D = Shape::D, kM = Shape::kM, kQueryBlocks = Shape::kQueryBlocks;
  static constexpr bool kWholeAddresses = kFusedChoices<Shape>.whole_addresses;

  // The lane's part of fragment addresses of keys and queries; whole addresses hold all but a
  // constant.
  uint32_t a8, b8, a16, b16;
  // Fragments of this warp's keys, where it holds them.
  uint32_t k8[kM][D / 32][4], v16[kM][D / 16][4];

  __device__ explicit FusedScores(uint8_t* shared) : Lane(shared) {
    a8 = tile::a_lane<D>(lane()), b8 = tile::b_lane<D>(lane());
    a16 = tile::a_lane<2 * D>(lane()), b16 = tile::b_lane<2 * D>(lane());
    if constexpr (kWholeAddresses) {
      a8 += first_key8(), b8 += first_query8();
      a16 += first_key16(), b16 += first_query16();
    }
  }
  template <typename V>
  __device__ V& at(uint32_t address) const {
    return Lane::template at<V>(address);
  }

  // Where this warp's keys and queries start in a tile at the start of the memory.
  __device__ uint32_t first_key8() const { return base + group() * 16 * kM * D; }
  __device__ uint32_t first_query8() const { return base + my_queries() * D; }
  __device__ uint32_t first_key16() const { return base + group() * 32 * kM * D; }
  __device__ uint32_t first_query16() const { return base + my_queries() * 2 * D; }
  // Operands of one contraction step: m and n are blocks of 16 rows, `front` is front_at.
  __device__ uint32_t key_address(int m, int k) const {
    const uint32_t at = a8 + static_cast<uint32_t>(offsetof(Shared, both.keys.k8));
    return tile::step_of(kWholeAddresses ? at : at + first_key8(), k) + m * 16 * D;
  }
  __device__ uint32_t query_address(uint32_t front, int n, int k) const {
    const uint32_t at = b8 + front + static_cast<uint32_t>(offsetof(Front, q8));
    return tile::step_of(kWholeAddresses ? at : at + first_query8(), k) + n * 16 * D;
  }
  __device__ uint32_t value_address(int m, int k) const {
    const uint32_t at = a16 + static_cast<uint32_t>(offsetof(Shared, both.keys.v16));
    return tile::step_of(kWholeAddresses ? at : at + first_key16(), k) + m * 32 * D;
  }
  __device__ uint32_t dout_address(uint32_t front, int n, int k) const {
    const uint32_t at = b16 + front + static_cast<uint32_t>(offsetof(Front, do16));
    return tile::step_of(kWholeAddresses ? at : at + first_query16(), k) + n * 32 * D;
  }

  __device__ void get_keys(uint32_t (&a)[4], int m, int k) const {
    if constexpr (Shape::kHolds)
      copy(a, k8[m][k]);
    else
      arch::ldmatrix_x4(a, key_address(m, k));
  }
  __device__ void get_values(uint32_t (&a)[4], int m, int k) const {
    if constexpr (Shape::kHolds)
      copy(a, v16[m][k]);
    else
      arch::ldmatrix_x4(a, value_address(m, k));
  }
  __device__ static void copy(uint32_t (&a)[4], const uint32_t (&from)[4]) {
#pragma unroll
    for (int i = 0; i < 4; ++i) a[i] = from[i];
  }
  /// Once keys are there. A barrier has to come before codes are written in their place.
  __device__ void hold_keys() {
    if constexpr (Shape::kHolds)
#pragma unroll
      for (int m = 0; m < kM; ++m) {
#pragma unroll
        for (int k = 0; k < D / 32; ++k) arch::ldmatrix_x4(k8[m][k], key_address(m, k));
#pragma unroll
        for (int k = 0; k < D / 16; ++k) arch::ldmatrix_x4(v16[m][k], value_address(m, k));
      }
  }

  /// φ·P: the values whose codes go into dV.
  __device__ void probabilities(Scores& x, int stage) const {
    int acc[kM][kQueryBlocks][4];
#pragma unroll
    for (int k = 0; k < D / 32; ++k) {
      uint32_t a[kM][4], b[kQueryBlocks / 2][4];
#pragma unroll
      for (int m = 0; m < kM; ++m) get_keys(a[m], m, k);
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
      for (int m = 0; m < kM; ++m) get_values(a[m], m, k);
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
};

}  // namespace sagebwd::cuda::sm80
