// SPDX-License-Identifier: Apache-2.0
// Exchanges between the four lanes that share a row.
#pragma once

#include <cstdint>

namespace sagebwd::cuda::tile {

/// Turns the 4 x 4 matrix around whose row t are the words of lane t of the quad.
__device__ __forceinline__ void quad_transpose(uint32_t (&words)[4], uint32_t lane) {
#pragma unroll
  for (int bit = 1; bit <= 2; bit *= 2) {
    const bool high = (lane & static_cast<uint32_t>(bit)) != 0;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      if ((i & bit) != 0) continue;
      uint32_t& low_word = words[i];
      uint32_t& high_word = words[i + bit];
      const uint32_t got = __shfl_xor_sync(0xffffffffu, high ? low_word : high_word, bit);
      (high ? low_word : high_word) = got;
    }
  }
}

}  // namespace sagebwd::cuda::tile
