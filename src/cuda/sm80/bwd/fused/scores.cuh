// SPDX-License-Identifier: Apache-2.0
// P and dS of a tile in the fused backward. Scores are transposed, so keys are rows.
#pragma once

#include <cstddef>

#include "cuda/arch/mma_sync.cuh"
#include "cuda/arch/scalar.cuh"
#include "cuda/sm80/bwd/fused/codes.cuh"
#include "cuda/sm80/bwd/fused/shared.cuh"
#include "cuda/tile/codes.cuh"
#include "cuda/tile/sequence.cuh"
#include "cuda/tile/softcap.cuh"

namespace sagebwd::cuda::sm80::fused_backward {

/// This warp's rows of K and V: from shared memory, or from registers where it holds them.
template <Config kConfig>
struct KeyOperands {
  static constexpr int D = kConfig.d;
  uint32_t k8[kKeyBlocks][D / 32][4], v16[kKeyBlocks][D / 16][4];

  /// Behind the barrier after which the keys are there. Another barrier has to come before codes
  /// are written in their place.
  __device__ void hold(const Thread<kConfig>& me) {
    if constexpr (kConfig.holds_keys)
#pragma unroll
      for (int m = 0; m < kKeyBlocks; ++m) {
#pragma unroll
        for (int k = 0; k < D / 32; ++k) arch::ldmatrix_x4(k8[m][k], me.keys_at(m, k));
#pragma unroll
        for (int k = 0; k < D / 16; ++k) arch::ldmatrix_x4(v16[m][k], me.values_at(m, k));
      }
  }
  __device__ void get_k(uint32_t (&a)[4], const Thread<kConfig>& me, int m, int k) const {
    if constexpr (kConfig.holds_keys)
      copy(a, k8[m][k]);
    else
      arch::ldmatrix_x4(a, me.keys_at(m, k));
  }
  __device__ void get_v(uint32_t (&a)[4], const Thread<kConfig>& me, int m, int k) const {
    if constexpr (kConfig.holds_keys)
      copy(a, v16[m][k]);
    else
      arch::ldmatrix_x4(a, me.values_at(m, k));
  }

 private:
  __device__ static void copy(uint32_t (&a)[4], const uint32_t (&from)[4]) {
#pragma unroll
    for (int i = 0; i < 4; ++i) a[i] = from[i];
  }
};

/// φ·P, where φ is the scale of dO's codes (sm80/formats.h): codes of this go into dV.
template <Config kConfig>
__device__ void probabilities(Scores& prob, const Thread<kConfig>& me,
                              const KeyOperands<kConfig>& keys, int stage) {
  constexpr int D = kConfig.d;
  using Front = typename SharedPlan<kConfig>::Front;
  int acc[kKeyBlocks][kQueryBlocks][4];
#pragma unroll
  for (int k = 0; k < D / 32; ++k) {
    uint32_t a[kKeyBlocks][4], b[kQueryBlocks / 2][4];
#pragma unroll
    for (int m = 0; m < kKeyBlocks; ++m) keys.get_k(a[m], me, m, k);
#pragma unroll
    for (int n = 0; n < kQueryBlocks / 2; ++n)
      arch::ldmatrix_x4(b[n], me.queries_at(me.front_at(stage), n, k));
#pragma unroll
    for (int n = 0; n < kQueryBlocks; ++n)
#pragma unroll
      for (int m = 0; m < kKeyBlocks; ++m)
        k == 0 ? tile::start_sum(acc[m][n], a[m], b[n / 2][n % 2 * 2], b[n / 2][n % 2 * 2 + 1])
               : arch::mma_8(acc[m][n], a[m], b[n / 2][n % 2 * 2], b[n / 2][n % 2 * 2 + 1]);
  }
  PerKey key, zero;  // `zero` takes the start of the sums off; exact, because scales have 22 bits
  me.get_key_scales(key);
#pragma unroll
  for (int m = 0; m < kKeyBlocks; ++m)
#pragma unroll
    for (int r = 0; r < 2; ++r) zero[m][r] = -tile::kMagicFloat * key[m][r];
  const uint32_t exponent = me.shared + me.front_at(stage) + offsetof(Front, exponent) +
                            (me.first_query() + 2 * me.t()) * 8;
#pragma unroll
  for (int n = 0; n < kQueryBlocks; ++n) {
    const float4 q = at<float4>(exponent + n * 64);  // logit factor, lse2; of two queries
    float2 centre;
    if constexpr (kConfig.capped())
      centre = at<float2>(me.shared + me.centre_logits_at(stage) +
                          (me.first_query() + 2 * me.t()) * 4 + n * 32);
#pragma unroll
    for (int m = 0; m < kKeyBlocks; ++m)
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        const float x = tile::scaled_sum(acc[m][n][e], key[m][e >> 1], zero[m][e >> 1]),
                    factor = e & 1 ? q.z : q.x, lse2 = e & 1 ? q.w : q.y;
        if constexpr (kConfig.capped())
          prob[m][n][e] = arch::exp2_approx(
              tile::capped(me.p.cap, fmaf(x, factor, e & 1 ? centre.y : centre.x)) - lse2);
        else
          prob[m][n][e] = arch::exp2_approx(fmaf(x, factor, -lse2));
      }
  }
}

/// y = dS·(logit factor of the query) from φ·P; in `paper` times the key's scale.
/// With a cap, `row_sum` is the warp's row sum of the query that the lane has by query_of_lane.
template <typename T, Config kConfig>
__device__ void gradients(Scores& y, const Scores& prob, const Thread<kConfig>& me,
                          const KeyOperands<kConfig>& keys, int stage, float& row_sum) {
  constexpr int D = kConfig.d;
  using Front = typename SharedPlan<kConfig>::Front;
#pragma unroll
  for (int m = 0; m < kKeyBlocks; ++m)
#pragma unroll
    for (int n = 0; n < kQueryBlocks; ++n)
#pragma unroll
      for (int e = 0; e < 4; ++e) y[m][n][e] = 0.0f;
#pragma unroll
  for (int k = 0; k < D / 16; ++k) {
    uint32_t a[kKeyBlocks][4], b[kQueryBlocks / 2][4];
#pragma unroll
    for (int m = 0; m < kKeyBlocks; ++m) keys.get_v(a[m], me, m, k);
#pragma unroll
    for (int n = 0; n < kQueryBlocks / 2; ++n)
      arch::ldmatrix_x4(b[n], me.douts_at(me.front_at(stage), n, k));
#pragma unroll
    for (int n = 0; n < kQueryBlocks; ++n)
#pragma unroll
      for (int m = 0; m < kKeyBlocks; ++m)
        arch::mma_16<T>(y[m][n], a[m], b[n / 2][n % 2 * 2], b[n / 2][n % 2 * 2 + 1]);
  }
  PerKey key, value;
  if constexpr (kConfig.paper()) me.get_key_scales(key);
  if constexpr (kConfig.has_v_codes()) me.get_value_scales(value);
  const uint32_t gradient = me.shared + me.front_at(stage) + offsetof(Front, gradient) +
                            (me.first_query() + 2 * me.t()) * 8;
  static_assert(offsetof(Front, gradient) > offsetof(Front, exponent));
  constexpr auto kFromExponent =
      static_cast<uint32_t>(offsetof(Front, gradient) - offsetof(Front, exponent));
#pragma unroll
  for (int n = 0; n < kQueryBlocks; ++n) {
    const float4 q = at<float4>(gradient + n * 64);  // slope, offset; of two queries
    float4 exponent;                                 // logit factor, lse2
    float sums[2] = {};
    if constexpr (kConfig.capped()) exponent = at<float4>(gradient - kFromExponent + n * 64);
#pragma unroll
    for (int m = 0; m < kKeyBlocks; ++m)
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        // What does not need dP comes first, so that it can be done while dP is on its way.
        const float slope = (e & 1 ? q.z : q.x) * (kConfig.has_v_codes() ? value[m][e >> 1] : 1.0f),
                    p = prob[m][n][e] * (kConfig.paper() ? key[m][e >> 1] : 1.0f);
        const float inner = fmaf(y[m][n][e], slope, e & 1 ? q.w : q.y);
        if constexpr (kConfig.capped()) {
          // From φ·P and its exponent: the logits are not kept.
          const float logit = arch::log2_approx(prob[m][n][e]) + (e & 1 ? exponent.w : exponent.y),
                      taken = tile::taken_by_cap(me.p.cap, logit),
                      // Not 0·NaN: masked pairs have a P of 0.
              before = prob[m][n][e] == 0.0f ? 0.0f : prob[m][n][e] * inner;
          y[m][n][e] = p * inner * (1.0f - taken);
          sums[e & 1] += before * (me.p.sums_what_cap_takes ? taken : 1.0f - taken);
        } else {
          y[m][n][e] = p * inner;
        }
      }
    if constexpr (kConfig.capped()) {  // at once: eight sums of a lane would take eight registers
      halve<1>(sums, me.lane(), 4, [](float a, float b) { return a + b; });
      sums[0] += __shfl_xor_sync(0xffffffffu, sums[0], 8);
      sums[0] += __shfl_xor_sync(0xffffffffu, sums[0], 16);
      if (me.lane() / 8 == static_cast<uint32_t>(n)) row_sum = sums[0];
    }
  }
}

/// Zeroes what the mask hides in a tile whose first query is query0.
template <Config kConfig>
__device__ void hide(Scores& x, const Thread<kConfig>& me, int query0) {
  const int key0 = me.walk().key0, nk = me.walk().s.nk;
  const tile::Band band = me.walk().band;
  // How far the key lies inside the band of the query.
  const int inside = key0 - query0 - static_cast<int>(me.first_query() + 2 * me.t()) - band.begin;
#pragma unroll
  for (int m = 0; m < kKeyBlocks; ++m)
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const int key = me.key(m, r);
      const uint32_t here = static_cast<uint32_t>(inside + key);
      const uint32_t width = key0 + key < nk ? band.width() : 0;
#pragma unroll
      for (int n = 0; n < kQueryBlocks; ++n)
#pragma unroll
        for (int e = 0; e < 2; ++e)
          if (here - n * 8 - e >= width) x[m][n][2 * r + e] = 0.0f;
    }
}

}  // namespace sagebwd::cuda::sm80::fused_backward
