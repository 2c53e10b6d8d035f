// SPDX-License-Identifier: Apache-2.0
// Scalar instructions that have no C++ spelling.
#pragma once

#include <cstdint>

namespace sagebwd::cuda::arch {

/// 2^x, two units in the last place; subnormal results are zero.
__device__ __forceinline__ float exp2_approx(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

/// Of subnormal numbers and zero: -inf.
__device__ __forceinline__ float log2_approx(float x) {
  float y;
  asm("lg2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

__device__ __forceinline__ float reciprocal_approx(float x) {
  float y;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

/// Makes the compiler keep a number instead of working it out again wherever it is used.
__device__ __forceinline__ void keep(uint32_t& x) { asm volatile("" : "+r"(x)); }

/// The thread's place in its block, asked for here and nowhere else: what follows from it is not
/// held in registers before.
__device__ __forceinline__ uint32_t thread_index() {
  uint32_t x;
  asm volatile("mov.u32 %0, %%tid.x;" : "=r"(x));
  return x;
}

/// min(a, b) that keeps NaN.
__device__ __forceinline__ float min_nan(float a, float b) {
  float y;
  asm("min.NaN.f32 %0, %1, %2;" : "=f"(y) : "f"(a), "f"(b));
  return y;
}

/// max(a, b) that keeps NaN.
__device__ __forceinline__ float max_nan(float a, float b) {
  float y;
  asm("max.NaN.f32 %0, %1, %2;" : "=f"(y) : "f"(a), "f"(b));
  return y;
}

__device__ __forceinline__ uint32_t byte_permute(uint32_t a, uint32_t b, uint32_t selector) {
  return __byte_perm(a, b, selector);
}

}  // namespace sagebwd::cuda::arch
