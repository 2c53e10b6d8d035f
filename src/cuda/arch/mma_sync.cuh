// SPDX-License-Identifier: Apache-2.0
// Warp-level matrix multiply-accumulate, sm_80 and later.
//
// Lane = 4g + t. Accumulator of an m16n8 product: c0, c1 = row g, columns 2t, 2t + 1; c2, c3 = row
// g + 8. 8-bit A, k32: register r holds row g + 8(r & 1), bytes k = 16(r >> 1) + 4t … + 3; B:
// register r holds column g, bytes k = 16r + 4t … + 3. 16-bit A, k16: register r holds row g + 8(r
// & 1), k = 8(r >> 1) + 2t, + 1; B: register r holds column g, k = 8r + 2t, + 1.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>
#include <type_traits>

namespace sagebwd::cuda::arch {

/// Of the bytes of A; those of B are signed.
enum class Bytes { s8, u8 };

/// d = a·b + c on bytes.
template <Bytes kA = Bytes::s8>
__device__ __forceinline__ void mma_8(int (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1,
                                      int c0, int c1, int c2, int c3) {
#define SAGE_MMA_8(type)                                                                         \
  asm("mma.sync.aligned.m16n8k32.row.col.s32." type                                              \
      ".s8.s32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%10,%11,%12,%13};"                        \
      : "=r"(d[0]), "=r"(d[1]), "=r"(d[2]), "=r"(d[3])                                           \
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1), "r"(c0), "r"(c1), "r"(c2), \
        "r"(c3))
  if constexpr (kA == Bytes::u8)
    SAGE_MMA_8("u8");
  else
    SAGE_MMA_8("s8");
#undef SAGE_MMA_8
}

/// d += a·b on bytes.
template <Bytes kA = Bytes::s8>
__device__ __forceinline__ void mma_8(int (&d)[4], const uint32_t (&a)[4], uint32_t b0,
                                      uint32_t b1) {
  mma_8<kA>(d, a, b0, b1, d[0], d[1], d[2], d[3]);
}

/// d += a·b with 16-bit inputs of type T and FP32 sums.
template <typename T>
__device__ __forceinline__ void mma_16(float (&d)[4], const uint32_t (&a)[4], uint32_t b0,
                                       uint32_t b1);

template <>
__device__ __forceinline__ void mma_16<__nv_bfloat16>(float (&d)[4], const uint32_t (&a)[4],
                                                      uint32_t b0, uint32_t b1) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, "
      "{%0,%1,%2,%3};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

template <>
__device__ __forceinline__ void mma_16<__half>(float (&d)[4], const uint32_t (&a)[4], uint32_t b0,
                                               uint32_t b1) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, "
      "{%0,%1,%2,%3};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

}  // namespace sagebwd::cuda::arch
