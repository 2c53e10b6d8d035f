// SPDX-License-Identifier: Apache-2.0
// From the sums to the caller's dK and dV.
#pragma once

#include <cstdint>

#include "cuda/sm90/bwd/work.cuh"
#include "cuda/tile/convert.cuh"
#include "cuda/tile/quad.cuh"
#include "cuda/tile/sequence.cuh"
#include "numerics/rotate.h"

namespace sagebwd::cuda::sm90::bwd {

/// x ← x·Rᵀ for the two rows of a quad. Bit 0 of a channel is bit 0 of its element, bits 1 and 2
/// are the lane, and the others are the block of eight.
template <int D>
__device__ void turn_back(float (&x)[D / 2], uint32_t lane, int size) {
  const auto step = [&](int distance) {  // between elements
#pragma unroll
    for (int i = 0; i < D / 2; ++i)
      if ((i & distance) == 0) {
        const float a = x[i], b = x[i + distance];
        x[i] = a + b, x[i + distance] = a - b;
      }
  };
  const auto exchange = [&](int distance) {  // between lanes
    const float sign = (lane & static_cast<uint32_t>(distance)) != 0 ? -1.0f : 1.0f;
#pragma unroll
    for (int i = 0; i < D / 2; ++i)
      x[i] = fmaf(x[i], sign, __shfl_xor_sync(0xffffffffu, x[i], distance));
  };
  step(1);
  exchange(1), exchange(2);
#pragma unroll
  for (int distance = 4; distance < D / 2; distance *= 2)
    if (2 * distance < size) step(distance);
  const float unit = numerics::rotation_unit(size);
#pragma unroll
  for (int i = 0; i < D / 2; ++i) {
    const int channel = i / 4 * 8 + static_cast<int>(lane % 4 * 2) + i % 2;
    x[i] *= numerics::rotation_flips(channel) ? -unit : unit;
  }
}

/// Writes a lane's two rows, if they are wanted. key: the first, in the block. rotation: what is
/// turned back; 0: nothing.
template <typename T, int D>
__device__ void store(float (&x)[D / 2], const Strided& to, bool chunks, const Walk& w, int key,
                      uint32_t lane, int rotation, bool wanted) {
  if (rotation > 0) turn_back<D>(x, lane, rotation);
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    const int token = w.key0 + key + 8 * r;
    const bool real = token < w.s.nk && wanted;
    T* out = tile::row_of<T>(to, w.s, w.kv_head, w.s.k_begin + token);
#pragma unroll
    for (int part = 0; part < D / 32; ++part) {
      uint32_t words[4];
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        const int i = 4 * (4 * part + j) + 2 * r;
        words[j] = tile::pack_16<T>(x[i], x[i + 1]);
      }
      tile::store_quad(out + 32 * part, words, lane, chunks, real);
    }
  }
}

}  // namespace sagebwd::cuda::sm90::bwd
