// SPDX-License-Identifier: Apache-2.0
// Codes of P and dS from half precision.
#pragma once

#include <cmath>
#include <cstdint>

#include "cuda/arch/half2.cuh"
#include "cuda/arch/scalar.cuh"

namespace sagebwd::cuda::sm90 {

/// What makes codes of a lane's two rows, and what a code is worth.
struct RowScales {
  uint32_t factor[2];  // pairs of halves
  float unit[2];
};

/// Scales from the largest magnitudes of the lane's part of its two rows, pairs of halves. The rows
/// are shared with the other lanes of the quad. NaN stays NaN.
template <int kLevels>
__device__ __forceinline__ RowScales row_scales(uint32_t most_low, uint32_t most_high) {
  // Both rows in one register.
  uint32_t top = arch::half2_max(arch::byte_permute(most_low, most_high, 0x5410),
                                 arch::byte_permute(most_low, most_high, 0x7632));
  top = arch::half2_max(top, __shfl_xor_sync(0xffffffffu, top, 1));
  top = arch::half2_max(top, __shfl_xor_sync(0xffffffffu, top, 2));
  const float2 tops = arch::half2_unpack(top);
  // Factors are halves too and end at kMostFactor. Rows that are all below 2^-8 have fewer levels.
  constexpr float kMostFactor = 60000.0f;
  const auto inverse = [](float x) {
    return arch::min_nan(kLevels * arch::reciprocal_approx(x), kMostFactor);
  };
  const uint32_t factors = arch::half2_of(inverse(tops.x), inverse(tops.y));
  const float2 rounded = arch::half2_unpack(factors);
  return {
      {arch::byte_permute(factors, factors, 0x1010), arch::byte_permute(factors, factors, 0x3232)},
      {arch::reciprocal_approx(rounded.x), arch::reciprocal_approx(rounded.y)}};
}

}  // namespace sagebwd::cuda::sm90
