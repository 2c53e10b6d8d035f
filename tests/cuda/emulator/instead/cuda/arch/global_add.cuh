// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cuda_fp16.h>

#include <atomic>
#include <cstdint>

#include "cuda/arch/half2.cuh"

namespace sagebwd::cuda::arch {

inline uint32_t sum_at(uint32_t lane, uint32_t e) {
#if __CUDA_ARCH__ >= 900
  return lane * 4 + e;
#else
  return e * 32 + lane;
#endif
}

inline float4 last_sums(const float* block, uint32_t lane) {
  return {block[sum_at(lane, 0)], block[sum_at(lane, 1)], block[sum_at(lane, 2)],
          block[sum_at(lane, 3)]};
}

inline void global_add(float* block, uint32_t lane, float x0, float x1, float x2, float x3) {
  const float x[4] = {x0, x1, x2, x3};
  for (uint32_t e = 0; e < 4; ++e) std::atomic_ref<float>(block[sum_at(lane, e)]).fetch_add(x[e]);
}

/// Only sm90 adds halves.
inline void global_add_halves(__half* blocks, uint32_t lane, const uint32_t (&words)[4]) {
  for (uint32_t i = 0; i < 4; ++i) {
    std::atomic_ref<uint32_t> at(reinterpret_cast<uint32_t*>(blocks)[lane * 4 + i]);
    uint32_t old = at;
    while (!at.compare_exchange_weak(old, half2_add(old, words[i]))) {
    }
  }
}
inline uint4 last_halves(const __half* blocks, uint32_t lane) {
  return reinterpret_cast<const uint4*>(blocks)[lane];
}

}  // namespace sagebwd::cuda::arch
