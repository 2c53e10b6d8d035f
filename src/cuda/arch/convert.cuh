// SPDX-License-Identifier: Apache-2.0
// FP32 to bytes.
#pragma once

#include <cstdint>

#include "cuda/arch/mma_sync.cuh"

namespace sagebwd::cuda::arch {

/// Four integers clamped to bytes.
template <Bytes kType>
__device__ __forceinline__ uint32_t pack_bytes(int ia, int ib, int ic, int id) {
  uint32_t high, word;
  if constexpr (kType == Bytes::u8) {
    asm("cvt.pack.sat.u8.s32.b32 %0, %1, %2, %3;" : "=r"(high) : "r"(id), "r"(ic), "r"(0));
    asm("cvt.pack.sat.u8.s32.b32 %0, %1, %2, %3;" : "=r"(word) : "r"(ib), "r"(ia), "r"(high));
  } else {
    asm("cvt.pack.sat.s8.s32.b32 %0, %1, %2, %3;" : "=r"(high) : "r"(id), "r"(ic), "r"(0));
    asm("cvt.pack.sat.s8.s32.b32 %0, %1, %2, %3;" : "=r"(word) : "r"(ib), "r"(ia), "r"(high));
  }
  return word;
}

/// Four numbers rounded to nearest even and clamped; NaN is 0. Two instructions from sm_86 on.
template <Bytes kType>
__device__ __forceinline__ uint32_t to_bytes(float a, float b, float c, float d) {
  return pack_bytes<kType>(__float2int_rn(a), __float2int_rn(b), __float2int_rn(c),
                           __float2int_rn(d));
}
/// The same with what is behind the point cut off.
template <Bytes kType>
__device__ __forceinline__ uint32_t cut_to_bytes(float a, float b, float c, float d) {
  return pack_bytes<kType>(__float2int_rz(a), __float2int_rz(b), __float2int_rz(c),
                           __float2int_rz(d));
}

}  // namespace sagebwd::cuda::arch
