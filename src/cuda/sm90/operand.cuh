// SPDX-License-Identifier: Apache-2.0
// An operand of a product in shared memory.
#pragma once

#include <cstddef>
#include <cstdint>

#include "cuda/arch/wgmma.cuh"

namespace sagebwd::cuda::sm90 {

/// Rows of kRowBytes bytes, 64 or 128, swizzled over as many (arch::operand_at). `place` is found
/// while the kernel runs; `bytes`, from there on, are a constant.
template <int kRowBytes>
struct Operand {
  uint32_t place;
  size_t bytes;

  __device__ __forceinline__ Operand from_row(int n) const {
    return {place, bytes + static_cast<size_t>(n) * kRowBytes};
  }
  /// What a step of the product reads: 32 bytes of each row.
  __device__ __forceinline__ uint64_t step(int k) const {
    return arch::operand_at<kRowBytes>(place, bytes + static_cast<size_t>(k) * 32);
  }
};

}  // namespace sagebwd::cuda::sm90
