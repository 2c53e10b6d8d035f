// SPDX-License-Identifier: Apache-2.0
// What a thread block of the backward makes of its keys before the first tile: K8 turned around for
// dQ, and the codes of V in 16 bit for dP. It has them for itself, so a pass of their own would
// only move them through memory.
#pragma once

#include <cstdint>

#include "cuda/arch/mbarrier.cuh"
#include "cuda/arch/wgmma.cuh"
#include "cuda/sm90/bwd/work.cuh"
#include "cuda/tile/codes.cuh"
#include "cuda/tuned/exact_scale.cuh"

namespace sagebwd::cuda::sm90::bwd {

using tuned::exact_scale;

/// K8ᵀ from K8, by a warpgroup: two slabs of 64 keys with a row per channel. Keys have the order of
/// tile::permuted, 16 at a time, and channels that of tile::turned_row, so that a lane's sums of dQ
/// are neighbours.
template <int D>
__device__ __forceinline__ void turn_keys(uint8_t* to, const uint8_t* from, uint32_t thread) {
  // A thread has four channels of 16 keys at a time.
#pragma unroll 1
  for (uint32_t i = thread; i < kKeys / 16 * (D / 4); i += kWarpgroup) {
    const uint32_t piece = i / (D / 4), word = i % (D / 4);
    uint32_t turned[4][4];  // [channel][word]
#pragma unroll
    for (int w = 0; w < 4; ++w) {
      uint32_t x[4];
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        const uint32_t key = piece * 16 + static_cast<uint32_t>(tile::permuted(4 * w + e));
        x[e] = *reinterpret_cast<const uint32_t*>(from + arch::swizzled<D>(key * D + word * 4));
      }
      tile::transpose_4x4(x);
#pragma unroll
      for (int e = 0; e < 4; ++e) turned[e][w] = x[e];
    }
#pragma unroll
    for (uint32_t e = 0; e < 4; ++e) {
      const auto row = static_cast<uint32_t>(tile::turned_row(static_cast<int>(word * 4 + e)));
      *reinterpret_cast<uint4*>(to + piece / 4 * (D * kSlab) +
                                arch::swizzled<kSlab>(row * kSlab + piece % 4 * 16)) =
          make_uint4(turned[e][0], turned[e][1], turned[e][2], turned[e][3]);
    }
  }
}

/// The codes of V of a warpgroup's 64 keys in 16 bit: panels of 64 channels, 128 bytes a row.
/// `from`: the row of its first key.
template <typename T, int D>
__device__ __forceinline__ void widen_values(uint8_t* to, const int8_t* from, uint32_t thread) {
  // Two threads share a key, and take 16 channels at a time.
  constexpr uint32_t kPieces = D / 32;
  const uint32_t key = thread / 2, channel0 = thread % 2 * (D / 2);
  uint4 codes[kPieces];
#pragma unroll
  for (uint32_t i = 0; i < kPieces; ++i)
    codes[i] = *reinterpret_cast<const uint4*>(from + key * D + channel0 + 16 * i);
#pragma unroll
  for (uint32_t i = 0; i < kPieces; ++i) {
    const uint32_t channel = channel0 + 16 * i,
                   at = key * 128 + channel % 64 * static_cast<uint32_t>(sizeof(T));
    uint8_t* panel = to + channel / 64 * (kKeys * 128);
    const uint32_t word[4] = {codes[i].x, codes[i].y, codes[i].z, codes[i].w};
#pragma unroll
    for (uint32_t half = 0; half < 2; ++half) {
      const uint2 low = tile::widened<T>(word[2 * half]),
                  high = tile::widened<T>(word[2 * half + 1]);
      *reinterpret_cast<uint4*>(panel + arch::swizzled<128>(at + 16 * half)) =
          make_uint4(low.x, low.y, high.x, high.y);
    }
  }
}

/// The products of a warpgroup see what its threads have written.
__device__ __forceinline__ void share_with_products(Meeting at) {
  arch::shared_writes_done();
  meet(at);
}

}  // namespace sagebwd::cuda::sm90::bwd
