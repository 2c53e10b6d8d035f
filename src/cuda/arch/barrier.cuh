// SPDX-License-Identifier: Apache-2.0
// Barriers of part of a thread block.
#pragma once

namespace sagebwd::cuda::arch {

/// Waits until `threads` threads have come to barrier `id` (1 … 15; 0 is __syncthreads).
__device__ __forceinline__ void barrier_sync(int id, int threads) {
  asm volatile("bar.sync %0, %1;" ::"r"(id), "r"(threads) : "memory");
}

}  // namespace sagebwd::cuda::arch
