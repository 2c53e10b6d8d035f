// SPDX-License-Identifier: Apache-2.0
// Rounding by dither (numerics/quantize.h): floor(y + t), t = frac(term of the query + term of the
// key).
//
// That is y + t - 1/2 rounded to nearest, but for ties (fewer than one number in 10^5), so codes
// are made by the instructions of nearest rounding. Terms of keys come with the 1/2 taken off.
// What is costly is worked out by one lane and handed to the others: a column's term, which eight
// lanes share, and a tile's uniform, whose hash is longer than all else here.
#pragma once

#include <cmath>
#include <cstdint>

#include "cuda/tile/codes.cuh"
#include "numerics/quantize.h"

namespace sagebwd::cuda::tile {

/// Factor that keeps codes inside the levels, where the largest y is the levels but for a few
/// roundings. It changes one code of 127 in 10^4, and smaller ones less often.
inline constexpr float kInside = 1.0f - 0x1p-20f;

/// Terms as numerics/quantize.h rounds them: a fused multiply-add would give another.
__device__ __forceinline__ float query_term(uint32_t i) {
  return numerics::frac(__fmul_rn(numerics::kDitherQuery, static_cast<float>(i)));
}
__device__ __forceinline__ float key_term(uint32_t j, float u) {
  return numerics::frac(__fadd_rn(__fmul_rn(numerics::kDitherKey, static_cast<float>(j)), u)) -
         0.5f;
}
/// t - 1/2.
__device__ __forceinline__ float dither_offset(float query_term, float key_term) {
  const float t = query_term + key_term;
  return t >= 0.5f ? t - 1.0f : t;
}

/// Uniforms of kOperands operands in the next tiles of a walk, one per lane. All lanes call with
/// the same step. Steps go up one by one; which tile a step is, `uniform` knows alone.
template <int kOperands>
class Uniforms {
 public:
  /// Before the uniforms of a step are asked for; `first`: of the walk.
  /// uniform(step, operand) works one out.
  template <typename Uniform>
  __device__ void draw(int step, bool first, Uniform uniform) {
    constexpr int kSteps = 32 / kOperands;
    if (!first && step % kSteps != 0) return;
    const int lane = static_cast<int>(threadIdx.x % 32);
    held_ = uniform(step / kSteps * kSteps + lane / kOperands, lane % kOperands);
  }
  __device__ float operator()(int step, int operand) const {
    return __shfl_sync(0xffffffffu, held_, (step * kOperands + operand) % 32);
  }

 private:
  float held_ = 0.0f;
};

/// Terms of a lane's columns 8b + 2t, 8b + 2t + 1 of an accumulator; held[i] is that of column
/// 32·i + lane.
template <int kBlocks>
__device__ __forceinline__ void spread_terms(float (&term)[kBlocks][2],
                                             const float (&held)[kBlocks / 4]) {
  const int t = static_cast<int>(threadIdx.x % 4);
#pragma unroll
  for (int b = 0; b < kBlocks; ++b)
#pragma unroll
    for (int e = 0; e < 2; ++e)
      term[b][e] = __shfl_sync(0xffffffffu, held[b / 4], b % 4 * 8 + 2 * t + e);
}

/// Terms of a lane's rows 16m + g, 16m + g + 8; held is that of row `lane`.
template <int kRowBlocks>
__device__ __forceinline__ void spread_row_terms(float (&term)[kRowBlocks][2], float held) {
  const int g = static_cast<int>(threadIdx.x % 32 / 4);
#pragma unroll
  for (int m = 0; m < kRowBlocks; ++m)
#pragma unroll
    for (int r = 0; r < 2; ++r) term[m][r] = __shfl_sync(0xffffffffu, held, 16 * m + 8 * r + g);
}

/// quantize_rows with the terms of rows g and g + 8 and of the columns, one of them being queries
/// and the other keys.
template <Bytes kCode, int kBlocks>
__device__ __forceinline__ void dither_rows(uint32_t (&a)[kBlocks / 4][4],
                                            const float (&x)[kBlocks][4], float inverse_low,
                                            float inverse_high, const float (&row)[2],
                                            const float (&column)[kBlocks][2]) {
  float y[kBlocks][4];
#pragma unroll
  for (int b = 0; b < kBlocks; ++b)
#pragma unroll
    for (int e = 0; e < 4; ++e)
      y[b][e] = fmaf(x[b][e], (e < 2 ? inverse_low : inverse_high) * kInside,
                     dither_offset(row[e >> 1], column[b][e & 1]));
  quantize_rows<kCode, kBlocks>(a, y, 1.0f, 1.0f);
}

}  // namespace sagebwd::cuda::tile
