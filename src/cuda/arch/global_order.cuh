// SPDX-License-Identifier: Apache-2.0
// Numbers in global memory by which thread blocks wait for each other.
#pragma once

#include <cstdint>

namespace sagebwd::cuda::arch {

/// Reads a number. What was written before it was released is seen behind this.
__device__ __forceinline__ uint32_t load_acquire(const uint32_t* from) {
  uint32_t x;
  asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(x) : "l"(from) : "memory");
  return x;
}

/// Adds to a number behind everything that this thread has written or met at a barrier.
__device__ __forceinline__ void add_release(uint32_t* to, uint32_t x) {
  asm volatile("red.release.gpu.global.add.u32 [%0], %1;" ::"l"(to), "r"(x) : "memory");
}

}  // namespace sagebwd::cuda::arch
