// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>

#include "cuda/arch/mma_sync.cuh"

namespace sagebwd::cuda::arch {

/// Four numbers rounded to nearest even and clamped; NaN is 0.
template <Bytes kType>
uint32_t to_bytes(float a, float b, float c, float d) {
  constexpr int kLow = kType == Bytes::u8 ? 0 : -128, kHigh = kLow + 255;
  uint32_t word = 0, at = 0;
  for (float x : {a, b, c, d}) {
    const int code = std::clamp(__float2int_rn(x), kLow, kHigh);
    word |= (static_cast<uint32_t>(code) & 255u) << at;
    at += 8;
  }
  return word;
}

}  // namespace sagebwd::cuda::arch
