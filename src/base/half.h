// SPDX-License-Identifier: Apache-2.0
// 16-bit floating point as storage: conversions to and from FP32, round to nearest even.
#pragma once

#include <bit>
#include <cstdint>

#include "base/inline.h"

namespace sagebwd {

struct bf16 {
  uint16_t bits;
};
struct f16 {
  uint16_t bits;
};

SAGE_INLINE float to_float(float x) { return x; }

SAGE_INLINE float to_float(bf16 x) {
  return std::bit_cast<float>(static_cast<uint32_t>(x.bits) << 16);
}

SAGE_INLINE float to_float(f16 x) {
  // Shift exponent and mantissa into place and let one multiplication fix the exponent bias:
  // it is exact for normal and subnormal halves alike. Inf and NaN need their exponent raised.
  const uint32_t sign = static_cast<uint32_t>(x.bits & 0x8000u) << 16;
  const uint32_t magnitude = static_cast<uint32_t>(x.bits & 0x7fffu) << 13;
  const float value = std::bit_cast<float>(magnitude) * 0x1p112f;
  const uint32_t bits =
      std::bit_cast<uint32_t>(value) | (magnitude >= 0x0f800000u ? 0x7f800000u : 0u);
  return std::bit_cast<float>(bits | sign);
}

template <typename T>
T from_float(float x);

template <>
SAGE_INLINE float from_float<float>(float x) {
  return x;
}

template <>
SAGE_INLINE bf16 from_float<bf16>(float x) {
  const uint32_t u = std::bit_cast<uint32_t>(x);
  if ((u & 0x7fffffffu) > 0x7f800000u)
    return {static_cast<uint16_t>((u >> 16) | 0x40u)};  // quiet NaN
  return {static_cast<uint16_t>((u + 0x7fffu + ((u >> 16) & 1u)) >> 16)};
}

template <>
SAGE_INLINE f16 from_float<f16>(float x) {
  const uint32_t u = std::bit_cast<uint32_t>(x);
  const uint32_t sign = (u >> 16) & 0x8000u;
  const uint32_t a = u & 0x7fffffffu;
  if (a > 0x7f800000u) return {static_cast<uint16_t>(sign | 0x7e00u)};
  if (a >= 0x477ff000u) return {static_cast<uint16_t>(sign | 0x7c00u)};  // rounds past 65504
  if (a < 0x38800000u) {
    // Subnormal half: adding 0.5 leaves the rounded 10-bit mantissa in the low bits.
    const float shifted = std::bit_cast<float>(a) + 0.5f;
    return {static_cast<uint16_t>(sign | (std::bit_cast<uint32_t>(shifted) - 0x3f000000u))};
  }
  const uint32_t rounded = a + 0xfffu + ((a >> 13) & 1u) - 0x38000000u;
  return {static_cast<uint16_t>(sign | (rounded >> 13))};
}

}  // namespace sagebwd
