// SPDX-License-Identifier: Apache-2.0
// Codes of P and dS from half precision, and the shares of V that P is multiplied by.
#pragma once

#include <cmath>
#include <cstddef>
#include <cstdint>

#include "cuda/arch/half2.cuh"
#include "cuda/arch/scalar.cuh"

namespace sagebwd::cuda::sm90 {

/// The scale of a token of V as its share of the largest of some tokens, before it becomes a half.
/// Whoever makes a share makes it here, because rows must not notice who did. That of a token which
/// is none of these is finite: its P is 0, and 0·Inf would be NaN.
__device__ __forceinline__ float value_share(float scale, float inverse_of_largest) {
  return fminf(__fmul_rn(scale, inverse_of_largest), 1.0f);
}

/// What makes codes of a lane's two rows, and what a code is worth.
struct RowScales {
  uint32_t factor[2];  // pairs of halves
  float unit[2];
};

/// The largest magnitudes of two rows, in one register, from those of the lane's part of each row,
/// which are pairs of halves. The rows are shared with the other lanes of the quad. NaN stays NaN.
__device__ __forceinline__ uint32_t row_tops(uint32_t most_low, uint32_t most_high) {
  uint32_t top = arch::half2_max(arch::byte_permute(most_low, most_high, 0x5410),
                                 arch::byte_permute(most_low, most_high, 0x7632));
  top = arch::half2_max(top, __shfl_xor_sync(0xffffffffu, top, 1));
  return arch::half2_max(top, __shfl_xor_sync(0xffffffffu, top, 2));
}

/// Scales of two rows. Factors are halves too and end at kMostFactor: rows that are all below
/// kLevels/kMostFactor have fewer levels.
template <int kLevels>
__device__ __forceinline__ RowScales row_scales(uint32_t tops) {
  constexpr float kMostFactor = 60000.0f;
  const auto inverse = [](float x) {
    return arch::min_nan(kLevels * arch::reciprocal_approx(x), kMostFactor);
  };
  const float2 top = arch::half2_unpack(tops);
  const uint32_t factors = arch::half2_of(inverse(top.x), inverse(top.y));
  const float2 rounded = arch::half2_unpack(factors);
  return {
      {arch::byte_permute(factors, factors, 0x1010), arch::byte_permute(factors, factors, 0x3232)},
      {arch::reciprocal_approx(rounded.x), arch::reciprocal_approx(rounded.y)}};
}

/// The same for rows that may be small, as those of dS of a query with little dO. Such a row is
/// multiplied by kLift first. Element i of `h` belongs to row i % 2.
template <int kLevels, size_t kCount>
__device__ __forceinline__ RowScales lifted_row_scales(uint32_t (&h)[kCount], uint32_t tops) {
  constexpr uint32_t kSmall = 0x1c001c00u;  // 2^-8, above kLevels/kMostFactor
  constexpr float kLift = 1024.0f;
  float back[2] = {1.0f, 1.0f};
  if (__any_sync(0xffffffffu, !arch::half2_both_reach(tops, kSmall))) {
    const float2 top = arch::half2_unpack(tops);
    const bool small[2] = {top.x < 0x1p-8f, top.y < 0x1p-8f};
    const float lift[2] = {small[0] ? kLift : 1.0f, small[1] ? kLift : 1.0f};
    tops = arch::half2_mul(tops, arch::half2_of(lift[0], lift[1]));
#pragma unroll
    for (size_t i = 0; i < kCount; ++i)
      h[i] = arch::half2_mul(h[i], arch::half2_of(lift[i % 2], lift[i % 2]));
    back[0] = small[0] ? 1.0f / kLift : 1.0f, back[1] = small[1] ? 1.0f / kLift : 1.0f;
  }
  RowScales scales = row_scales<kLevels>(tops);
  scales.unit[0] *= back[0], scales.unit[1] *= back[1];
  return scales;
}

}  // namespace sagebwd::cuda::sm90
