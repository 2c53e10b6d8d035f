// SPDX-License-Identifier: Apache-2.0
// Places that are used in turn, each with a barrier (arch/mbarrier.cuh).
#pragma once

#include <cstdint>

namespace sagebwd::cuda::sm90 {

/// The next place, and the parity of the phase in which it is waited for.
template <int kPlaces>
struct Ring {
  int place = 0;
  uint32_t parity;
  __device__ explicit Ring(uint32_t first) : parity(first) {}
  __device__ __forceinline__ void advance() {
    if (++place == kPlaces) place = 0, parity ^= 1;
  }
};

}  // namespace sagebwd::cuda::sm90
