// SPDX-License-Identifier: Apache-2.0
// Pairs of halves in a register.
#pragma once

#include <cuda_fp16.h>

#include <bit>
#include <cmath>
#include <cstdint>

#include "cuda/arch/mma_sync.cuh"
#include "cuda/arch/scalar.cuh"

namespace sagebwd::cuda::arch {

/// Rounded once. FP32 has more than twice the bits of a half, so an odd last bit suffices to say
/// that there was a rest. NaN is the one that a GPU makes.
inline uint32_t half_of(double exact) {
  if (exact != exact) return 0x7fff;
  float x = static_cast<float>(exact);
  if (static_cast<double>(x) != exact && std::isfinite(x)) {
    if (std::fabs(static_cast<double>(x)) > std::fabs(exact)) x = std::nextafter(x, 0.0f);
    x = std::bit_cast<float>(std::bit_cast<uint32_t>(x) | 1u);
  }
  return from_float<f16>(x).bits;
}
inline uint32_t half2_of(float low, float high) { return half_of(low) | half_of(high) << 16; }
inline float2 half2_unpack(uint32_t x) {
  return {to_float(f16{static_cast<uint16_t>(x)}), to_float(f16{static_cast<uint16_t>(x >> 16)})};
}
inline float half2_sum(uint32_t x) {
  const float2 y = half2_unpack(x);
  return y.x + y.y;
}
inline uint32_t half2_fma(uint32_t a, uint32_t b, uint32_t c) {
  const float2 x = half2_unpack(a), y = half2_unpack(b), z = half2_unpack(c);
  return half_of(static_cast<double>(x.x) * y.x + z.x) |
         half_of(static_cast<double>(x.y) * y.y + z.y) << 16;
}
inline uint32_t half2_add(uint32_t a, uint32_t b) {
  const float2 x = half2_unpack(a), y = half2_unpack(b);
  return half2_of(x.x + y.x, x.y + y.y);
}
inline uint32_t half2_mul(uint32_t a, uint32_t b) {
  const float2 x = half2_unpack(a), y = half2_unpack(b);
  return half2_of(x.x * y.x, x.y * y.y);
}
inline uint32_t half2_max(uint32_t a, uint32_t b) {
  const float2 x = half2_unpack(a), y = half2_unpack(b);
  return half2_of(max_nan(x.x, y.x), max_nan(x.y, y.y));
}
inline uint32_t half2_min(uint32_t a, uint32_t b) {
  const float2 x = half2_unpack(a), y = half2_unpack(b);
  return half2_of(min_nan(x.x, y.x), min_nan(x.y, y.y));
}
inline uint32_t half2_abs(uint32_t a) { return a & 0x7fff7fffu; }
inline bool half2_both_reach(uint32_t a, uint32_t b) {
  const float2 x = half2_unpack(a), y = half2_unpack(b);
  return x.x >= y.x && x.y >= y.y;
}
template <Bytes kCode>
uint32_t half2_codes(uint32_t a, uint32_t b, uint32_t factor) {
  constexpr uint32_t kStart = kCode == Bytes::u8 ? 0x64006400u : 0x66006600u;
  return byte_permute(half2_fma(a, factor, kStart), half2_fma(b, factor, kStart), 0x6420);
}

}  // namespace sagebwd::cuda::arch
