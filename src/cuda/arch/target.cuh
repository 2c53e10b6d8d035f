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

/// Shared memory of a multiprocessor, and what each thread block costs beside its own. PTX for
/// sm_80 serves GPUs that are not named here.
constexpr int shared_memory_of(int target) {
  return (target / 100 == 9 || target / 100 == 10 ? 228 : target == 800 ? 164 : 100) << 10;
}
inline constexpr int kSharedMemoryPerBlock = 1 << 10;

/// The most that a thread block of code for `target` may have.
constexpr int shared_memory_limit_of(int target) {
  return shared_memory_of(target) - kSharedMemoryPerBlock;
}

/// How many thread blocks with so much shared memory share a multiprocessor of the target and its
/// registers, `most` at most.
constexpr int resident(std::size_t bytes, int most) {
  return std::clamp(shared_memory_of(kTarget) / (static_cast<int>(bytes) + kSharedMemoryPerBlock),
                    1, most);
}

/// Whether the target runs a kernel whose thread blocks have `bytes` of shared memory, and another
/// one with `larger` where that fits (0: there is none). Elsewhere its code is not made.
constexpr bool runs_here(std::size_t bytes, std::size_t larger) {
  constexpr std::size_t limit = shared_memory_limit_of(kTarget);
  return bytes <= limit && (larger == 0 || larger > limit);
}

}  // namespace sagebwd::cuda::arch
