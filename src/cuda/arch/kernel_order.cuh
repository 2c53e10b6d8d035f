// SPDX-License-Identifier: Apache-2.0
// Kernels of a stream that overlap (host/launch.h, Start::early).
#pragma once

namespace sagebwd::cuda::arch {

/// Waits until the kernels before this one are done, and sees what they wrote. Where the launch did
/// not ask to start early they are done already.
__device__ __forceinline__ void wait_for_earlier_kernels() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

/// Lets the next kernel start when all thread blocks have come here or ended, if it asked for that.
__device__ __forceinline__ void let_next_kernel_start() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}

}  // namespace sagebwd::cuda::arch
