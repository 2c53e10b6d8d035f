// SPDX-License-Identifier: Apache-2.0
// FP32 products on the tensor cores, sm_80 and later.
//
// Lane = 4g + t. A, k8: register r holds row g + 8(r & 1), k = t + 4(r >> 1). B: register r holds
// column g, k = t + 4r. The accumulator is that of arch/mma_sync.cuh.
#pragma once

#include <cstdint>

namespace sagebwd::cuda::arch {

/// d += a·b with TF32 inputs (FP32 bits whose low 13 are zero) and FP32 sums.
__device__ __forceinline__ void mma_tf32(float (&d)[4], const uint32_t (&a)[4], uint32_t b0,
                                         uint32_t b1) {
  asm("mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, "
      "{%0,%1,%2,%3};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

/// A value as the sum of two TF32 numbers, 21 bits or more of it.
struct Tf32Pair {
  uint32_t high, low;
};
__device__ __forceinline__ Tf32Pair split_tf32(float x) {
  const uint32_t high = __float_as_uint(x) & 0xffffe000u;
  return {high, __float_as_uint(x - __uint_as_float(high)) & 0xffffe000u};
}

}  // namespace sagebwd::cuda::arch
