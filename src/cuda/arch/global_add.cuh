// SPDX-License-Identifier: Apache-2.0
// Adding the four values of an m16n8 accumulator to sums in global memory, and reading them.
//
// The 128 sums of such a block lie together, in the order that lets the instruction of the target
// cover whole sectors: four values of a lane together where a vector can be added (sm_90 and
// later), else one value of all lanes together.
#pragma once

#include <cuda_fp16.h>

#include <cstdint>

namespace sagebwd::cuda::arch {

/// Where value e (0 … 3) of a lane lies inside the block.
__device__ __forceinline__ uint32_t sum_at(uint32_t lane, uint32_t e) {
#if __CUDA_ARCH__ >= 900
  return lane * 4 + e;
#else
  return e * 32 + lane;
#endif
}

/// The lane's values of a block whose sums nobody adds to any more and nobody reads again.
__device__ __forceinline__ float4 last_sums(const float* block, uint32_t lane) {
#if __CUDA_ARCH__ >= 900
  return __ldcs(reinterpret_cast<const float4*>(block) + lane);
#else
  return make_float4(__ldcs(block + sum_at(lane, 0)), __ldcs(block + sum_at(lane, 1)),
                     __ldcs(block + sum_at(lane, 2)), __ldcs(block + sum_at(lane, 3)));
#endif
}

__device__ __forceinline__ void global_add(float* block, uint32_t lane, float x0, float x1,
                                           float x2, float x3) {
#if __CUDA_ARCH__ >= 900
  asm volatile("red.relaxed.gpu.global.add.v4.f32 [%0], {%1, %2, %3, %4};" ::"l"(block + lane * 4),
               "f"(x0), "f"(x1), "f"(x2), "f"(x3)
               : "memory");
#else
  const float x[4] = {x0, x1, x2, x3};
#pragma unroll
  for (uint32_t e = 0; e < 4; ++e)
    asm volatile("red.relaxed.gpu.global.add.f32 [%0], %1;" ::"l"(block + sum_at(lane, e)),
                 "f"(x[e])
                 : "memory");
#endif
}

// The same in half precision, for two neighbouring blocks at a time: 256 sums, eight of a lane
// together. sm_90 and later.

/// words: pairs of halves, values 0, 1 and 2, 3 of the first block and then of the second.
__device__ __forceinline__ void global_add_halves(__half* blocks, uint32_t lane,
                                                  const uint32_t (&words)[4]) {
  asm volatile(
      "red.relaxed.gpu.global.add.noftz.v4.f16x2 [%0], {%1, %2, %3, %4};" ::"l"(blocks + lane * 8),
      "r"(words[0]), "r"(words[1]), "r"(words[2]), "r"(words[3])
      : "memory");
}
/// The same four words, to read them. Asked for where it is written: the compiler would do so
/// later, behind what waits for other loads.
__device__ __forceinline__ uint4 last_halves(const __half* blocks, uint32_t lane) {
  uint4 words;
  asm volatile("ld.global.cs.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(words.x), "=r"(words.y), "=r"(words.z), "=r"(words.w)
               : "l"(blocks + lane * 8)
               : "memory");
  return words;
}

}  // namespace sagebwd::cuda::arch
