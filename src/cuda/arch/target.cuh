// SPDX-License-Identifier: Apache-2.0
// The GPU that code is compiled for, as far as kernels of the same kind differ by it.
#pragma once

#include <algorithm>
#include <cstddef>

namespace sagebwd::cuda::arch {

#ifdef __CUDA_ARCH__
inline constexpr int kTarget = __CUDA_ARCH__;
#else
inline constexpr int kTarget = 900;  // the host's reading of a kernel, from which no code is made
#endif

/// Whether code is made for Hopper, the target on which the tuned kernels were measured.
inline constexpr bool kIsHopper = kTarget / 10 == 90;

/// Shared memory of a multiprocessor, and what each thread block costs beside its own. PTX for
/// sm_80 serves GPUs that are not named here.
constexpr int shared_memory_of(int target) {
  return (target / 100 == 9 || target / 100 == 10 ? 228 : target == 800 ? 164 : 100) << 10;
}
inline constexpr int kSharedMemoryPerBlock = 1 << 10;

/// What `blocks` thread blocks with `bytes` of their own take.
constexpr int shared_memory_for(std::size_t bytes, int blocks = 1) {
  return blocks * (static_cast<int>(bytes) + kSharedMemoryPerBlock);
}

/// How many thread blocks with so much shared memory share a multiprocessor of the target and its
/// registers, `most` at most.
constexpr int resident(std::size_t bytes, int most) {
  return std::clamp(shared_memory_of(kTarget) / shared_memory_for(bytes), 1, most);
}

/// Whether the target runs a kernel that takes so much of a multiprocessor's shared memory, but
/// another one with `larger` where that fits (0: there is none). Elsewhere its code is not made.
/// Code for sm_80 also runs on GPUs that have as little as sm_86.
constexpr bool runs_here(int taken, int larger) {
  constexpr int all = shared_memory_of(kTarget),
                least = kTarget == 800 ? shared_memory_of(860) : all;
  return taken <= all && (larger == 0 || larger > least);
}

/// Whether the target has kernels that cap logits at head dim `d`. In the backward of head dim 128,
/// code for sm_120 would take one register too many. cuda-sm80 declines such calls there.
constexpr bool caps(int d) { return d <= 64 || kTarget < 1200; }

}  // namespace sagebwd::cuda::arch
