// SPDX-License-Identifier: Apache-2.0
// Pairs of half-precision numbers in a register: instructions that work on both.
#pragma once

#include <cuda_fp16.h>

#include <cstdint>

#include "cuda/arch/mma_sync.cuh"
#include "cuda/arch/scalar.cuh"

namespace sagebwd::cuda::arch {

__device__ __forceinline__ uint32_t half2_of(float low, float high) {
  uint32_t y;
  asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(y) : "f"(high), "f"(low));
  return y;
}
__device__ __forceinline__ float2 half2_unpack(uint32_t x) {
  return __half22float2(*reinterpret_cast<const __half2*>(&x));
}
__device__ __forceinline__ float half2_sum(uint32_t x) {
  const float2 y = half2_unpack(x);
  return y.x + y.y;
}
__device__ __forceinline__ uint32_t half2_add(uint32_t a, uint32_t b) {
  uint32_t y;
  asm("add.rn.f16x2 %0, %1, %2;" : "=r"(y) : "r"(a), "r"(b));
  return y;
}
__device__ __forceinline__ uint32_t half2_mul(uint32_t a, uint32_t b) {
  uint32_t y;
  asm("mul.rn.f16x2 %0, %1, %2;" : "=r"(y) : "r"(a), "r"(b));
  return y;
}
__device__ __forceinline__ uint32_t half2_fma(uint32_t a, uint32_t b, uint32_t c) {
  uint32_t y;
  asm("fma.rn.f16x2 %0, %1, %2, %3;" : "=r"(y) : "r"(a), "r"(b), "r"(c));
  return y;
}
/// These keep NaN.
__device__ __forceinline__ uint32_t half2_max(uint32_t a, uint32_t b) {
  uint32_t y;
  asm("max.NaN.f16x2 %0, %1, %2;" : "=r"(y) : "r"(a), "r"(b));
  return y;
}
__device__ __forceinline__ uint32_t half2_min(uint32_t a, uint32_t b) {
  uint32_t y;
  asm("min.NaN.f16x2 %0, %1, %2;" : "=r"(y) : "r"(a), "r"(b));
  return y;
}
__device__ __forceinline__ uint32_t half2_abs(uint32_t a) {
  uint32_t y;
  asm("abs.f16x2 %0, %1;" : "=r"(y) : "r"(a));
  return y;
}

/// Whether both are at least as large as those of b. NaN is not.
__device__ __forceinline__ bool half2_both_reach(uint32_t a, uint32_t b) {
  return __hbge2(*reinterpret_cast<const __half2*>(&a), *reinterpret_cast<const __half2*>(&b));
}

/// Two pairs times a factor, rounded to integers: the bytes {a low, a high, b low, b high}. Halves
/// from 1024 on have steps of one, so that adding 1024 (1536 for signed codes) rounds, and the low
/// byte of the sum is the code.
template <Bytes kCode>
__device__ __forceinline__ uint32_t half2_codes(uint32_t a, uint32_t b, uint32_t factor) {
  constexpr uint32_t kStart = kCode == Bytes::u8 ? 0x64006400u : 0x66006600u;
  return byte_permute(half2_fma(a, factor, kStart), half2_fma(b, factor, kStart), 0x6420);
}

}  // namespace sagebwd::cuda::arch
