// SPDX-License-Identifier: Apache-2.0
// The rotation of numerics/rotate.h for rows that neighbouring lanes hold, in chunks of eight
// channels. Additions are those of numerics::rotate in the same order, so results have the same
// bits.
#pragma once

#include <cmath>
#include <cstdint>

#include "numerics/rotate.h"

namespace sagebwd::cuda::tile {

/// Signs of the eight channels from `channel` on, a multiple of eight.
__device__ __forceinline__ void flip_signs(float (&x)[8], uint32_t channel) {
  const uint32_t signs = numerics::rotation_signs(static_cast<int>(channel / 32)) >> channel % 32;
#pragma unroll
  for (int e = 0; e < 8; ++e)
    x[e] = __uint_as_float(__float_as_uint(x[e]) ^ ((signs << (31 - e)) & 0x80000000u));
}

/// The same signs for numbers of 16 bits, two to a word: shifted left by w, this has those of word
/// w in its bits 15 and 31.
__device__ __forceinline__ uint32_t packed_signs(uint32_t channel) {
  const uint32_t signs = numerics::rotation_signs(static_cast<int>(channel / 32)) >> channel % 32;
  uint32_t packed = 0;
#pragma unroll
  for (int w = 0; w < 4; ++w)
    packed |= (signs >> 2 * w & 1) << (15 - w) | (signs >> (2 * w + 1) & 1) << (31 - w);
  return packed;
}

/// One step of the Hadamard transform.
__device__ __forceinline__ void butterfly(float& a, float& b) {
  const float sum = a + b;
  b = a - b, a = sum;
}

/// Steps between channels of the same chunk.
__device__ __forceinline__ void hadamard_inside(float (&x)[8]) {
#pragma unroll
  for (int h = 1; h < 8; h *= 2)
#pragma unroll
    for (int e = 0; e < 8; ++e)
      if ((e & h) == 0) butterfly(x[e], x[e + h]);
}

/// The step between lanes `distance` apart. `upper`: this lane has the later channels, and gets the
/// difference. A product with ±1 is exact.
__device__ __forceinline__ void hadamard_across(float (&x)[8], int distance, bool upper) {
  const float sign = upper ? -1.0f : 1.0f;
#pragma unroll
  for (int e = 0; e < 8; ++e) x[e] = fmaf(x[e], sign, __shfl_xor_sync(0xffffffffu, x[e], distance));
}

// Rows that four lanes hold: each has eight channels of every 32. Few steps then cross lanes.
// `member`: which of the four this lane is.

template <int kParts>
__device__ __forceinline__ void flip_signs(float (&x)[kParts][8], uint32_t member) {
#pragma unroll
  for (uint32_t part = 0; part < kParts; ++part) flip_signs(x[part], part * 32 + member * 8);
}

/// x ← x·H/√size in blocks of `size` channels, a power of two from 8 on. Without kScaled x·H.
template <bool kScaled = true, int kParts>
__device__ __forceinline__ void hadamard(float (&x)[kParts][8], uint32_t member, int size) {
#pragma unroll
  for (int part = 0; part < kParts; ++part) hadamard_inside(x[part]);
#pragma unroll
  for (int distance = 1; distance < 4; distance *= 2) {
    if (8 * distance >= size) break;
#pragma unroll
    for (int part = 0; part < kParts; ++part)
      hadamard_across(x[part], distance, (member & static_cast<uint32_t>(distance)) != 0);
  }
#pragma unroll
  for (int h = 1; h < kParts; h *= 2) {
    if (32 * h >= size) break;
#pragma unroll
    for (int part = 0; part < kParts; ++part)
#pragma unroll
      for (int e = 0; e < 8; ++e)
        if ((part & h) == 0) butterfly(x[part][e], x[part + h][e]);
  }
  if constexpr (!kScaled) return;
  const float unit = numerics::rotation_unit(size);
#pragma unroll
  for (int part = 0; part < kParts; ++part)
#pragma unroll
    for (int e = 0; e < 8; ++e) x[part][e] = __fmul_rn(x[part][e], unit);
}

}  // namespace sagebwd::cuda::tile
