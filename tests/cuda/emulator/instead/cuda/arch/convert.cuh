// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>

#include "cuda/arch/mma_sync.cuh"

namespace sagebwd::cuda::arch {

/// Four integers clamped to bytes.
template <Bytes kType>
uint32_t pack_bytes(int a, int b, int c, int d) {
  constexpr int kLow = kType == Bytes::u8 ? 0 : -128, kHigh = kLow + 255;
  uint32_t word = 0, at = 0;
  for (int x : {a, b, c, d}) {
    const int code = std::clamp(x, kLow, kHigh);
    word |= (static_cast<uint32_t>(code) & 255u) << at;
    at += 8;
  }
  return word;
}

/// Four numbers rounded to nearest even and clamped; NaN is 0.
template <Bytes kType>
uint32_t to_bytes(float a, float b, float c, float d) {
  return pack_bytes<kType>(__float2int_rn(a), __float2int_rn(b), __float2int_rn(c),
                           __float2int_rn(d));
}
/// The same with what is behind the point cut off.
template <Bytes kType>
uint32_t cut_to_bytes(float a, float b, float c, float d) {
  return pack_bytes<kType>(__float2int_rz(a), __float2int_rz(b), __float2int_rz(c),
                           __float2int_rz(d));
}

}  // namespace sagebwd::cuda::arch
