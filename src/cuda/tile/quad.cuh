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

/// Writes 32 neighbouring channels of a row. Word j of lane t has channels 8·j + 2·t and the next.
/// chunks: the row starts at a multiple of 16 bytes; then lanes exchange words, so that each writes
/// eight neighbouring channels. real: whether the row is written at all. All lanes come here.
template <typename T>
__device__ __forceinline__ void store_quad(T* to, uint32_t (&words)[4], uint32_t lane, bool chunks,
                                           bool real) {
  if (chunks) {
    quad_transpose(words, lane);
    if (real)
      *reinterpret_cast<uint4*>(to + lane % 4 * 8) =
          make_uint4(words[0], words[1], words[2], words[3]);
  } else if (real) {
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      const T* pair = reinterpret_cast<const T*>(&words[j]);
      to[8 * j + lane % 4 * 2] = pair[0], to[8 * j + lane % 4 * 2 + 1] = pair[1];
    }
  }
}

}  // namespace sagebwd::cuda::tile
