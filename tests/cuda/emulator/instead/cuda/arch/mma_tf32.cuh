// SPDX-License-Identifier: Apache-2.0
// The product of src/cuda/arch/mma_tf32.cuh: that of mma_sync.cuh with one element in a register.
#pragma once

#include <cstdint>

#include "cuda/arch/mma_sync.cuh"

namespace sagebwd::cuda::arch {

inline void mma_tf32(float (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
  MmaRegisters<float> mine{a, {b0, b1}, d};
  emulator::meet(mine, multiply<float, float, float, float>);
}

struct Tf32Pair {
  uint32_t high, low;
};
inline Tf32Pair split_tf32(float x) {
  const uint32_t high = __float_as_uint(x) & 0xffffe000u;
  return {high, __float_as_uint(x - __uint_as_float(high)) & 0xffffe000u};
}

}  // namespace sagebwd::cuda::arch
