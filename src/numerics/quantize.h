// SPDX-License-Identifier: Apache-2.0
// The quantiser: symmetric INT8 with an FP32 scale. Scalar maths shared by the recipe oracle and
// all backends.
//
// Values that share a scale count as zero if the largest magnitude is below 2^-100: scale 0, codes
// 0. There is no additive floor, because the softmax gradient of a real model has an RMS near 1e-7.
// If one of them is NaN or Inf, the scale is NaN, so that whatever is made from the codes is NaN.
#pragma once

#include <bit>
#include <cmath>
#include <cstdint>
#include <limits>

#include "base/hash.h"
#include "base/inline.h"

namespace sagebwd::numerics {

inline constexpr float kLevels = 127.0f;          // codes are in [-127, 127]; -128 is never made
inline constexpr float kUnsignedLevels = 255.0f;  // of P, where its codes are unsigned
inline constexpr float kZeroAmax = 0x1p-100f;
inline constexpr float kLeastValueScale = 0x1p-40f;
inline constexpr float kLog2e = 1.44269504088896340736f;
inline constexpr double kLn2 = 0.693147180559945309417;

/// Scale of values with largest magnitude `amax` (Inf or NaN: poisoned).
SAGE_INLINE float scale_of(float amax, float levels = kLevels) {
  if (!(amax <= std::numeric_limits<float>::max())) return std::numeric_limits<float>::quiet_NaN();
  return amax < kZeroAmax ? 0.0f : amax / levels;
}

/// An operand of a matmul out of INT8. There, too, Inf counts as NaN: a logit of -Inf would hide
/// it.
SAGE_INLINE float inf_as_nan(float x) { return x + (x - x); }

/// A value of O that FP16 can hold. O is a mean of values of V, but the codes of P add up to 1 only
/// nearly, and an O beyond the largest FP16 would become Inf, and its gradients NaN.
SAGE_INLINE float within_f16(float x) {
  constexpr float kMost = 65504.0f;
  if (!(std::fabs(x) > kMost) || !(std::fabs(x) <= std::numeric_limits<float>::max())) return x;
  return x > 0.0f ? kMost : -kMost;
}

/// Scale of a key of its own, in `vectorwise`: rounded up to 22 bits, so that its product with
/// 1.5·2^23 is exact and codes stay within 127.
SAGE_INLINE float key_scale_of(float amax) {
  const float scale = scale_of(amax);
  if (!(scale == scale)) return scale;
  return std::bit_cast<float>((std::bit_cast<uint32_t>(scale) + 3u) & ~3u);
}

/// Scale of a token of V in `vectorwise`, which may not depend on its neighbours. The floor is
/// there because its logarithm and its inverse are used.
SAGE_INLINE float lone_value_scale(float amax) {
  const float scale = scale_of(amax);
  return scale < kLeastValueScale ? kLeastValueScale : scale;  // NaN stays
}

/// Factor that maps a value onto codes. 0 for scales that are 0 or NaN.
SAGE_INLINE float inverse_of(float scale) { return scale > 0.0f ? 1.0f / scale : 0.0f; }

/// Code under nearest rounding (ties to even).
SAGE_INLINE int code_nearest(float x, float inverse) {
  const float y = x * inverse;
  return y == y ? static_cast<int>(std::nearbyint(y)) : 0;
}

/// Dither: floor(y + t), t = frac(i·g1 + j·g2 + u), with (i, j) the query and key inside the tile
/// and u one uniform number of the tile. Unbiased over u, and low-discrepancy inside a tile.
inline constexpr float kDitherQuery = 0.7548776662f;
inline constexpr float kDitherKey = 0.5698402910f;

SAGE_INLINE float frac(float x) { return x - std::floor(x); }
SAGE_INLINE float dither_query_term(int i) { return frac(kDitherQuery * static_cast<float>(i)); }
SAGE_INLINE float dither_key_term(int j, float u) {
  return frac(kDitherKey * static_cast<float>(j) + u);
}
SAGE_INLINE float dither_offset(float query_term, float key_term) {
  const float t = query_term + key_term;
  return t >= 1.0f ? t - 1.0f : t;
}

/// Which quantised operand a tile's uniform belongs to.
enum class DitherOperand : uint64_t { p_forward = 0, p_backward = 1, ds_query = 2, ds_key = 3 };

SAGE_INLINE float dither_uniform(uint64_t seed, int64_t sequence, int64_t head, int64_t q_tile,
                                 int64_t k_tile, DitherOperand operand) {
  return unit_float(hash64({seed, static_cast<uint64_t>(sequence), static_cast<uint64_t>(head),
                            static_cast<uint64_t>(q_tile), static_cast<uint64_t>(k_tile),
                            static_cast<uint64_t>(operand)}));
}

SAGE_INLINE int code_dither(float x, float inverse, float t, float levels = kLevels) {
  const float y = x * inverse;
  if (!(y == y)) return 0;
  const float c = std::floor(y + t);
  return static_cast<int>(c > levels ? levels : c < -levels ? -levels : c);
}

SAGE_INLINE bool is_finite(float x) {
  return (std::bit_cast<uint32_t>(x) & 0x7f800000u) != 0x7f800000u;
}

}  // namespace sagebwd::numerics
