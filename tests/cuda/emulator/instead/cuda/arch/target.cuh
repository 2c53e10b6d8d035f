// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>

namespace sagebwd::cuda::arch {

#ifdef __CUDA_ARCH__
inline constexpr int kTarget = __CUDA_ARCH__;
#else
inline constexpr int kTarget = 900;
#endif

constexpr int resident(std::size_t, int most) { return most; }
/// Any: how much shared memory there is, is decided when a test starts.
constexpr bool runs_here(std::size_t, std::size_t) { return true; }
/// That of any target.
constexpr int shared_memory_limit_of(int) { return 227 << 10; }

}  // namespace sagebwd::cuda::arch
