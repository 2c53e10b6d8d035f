// SPDX-License-Identifier: Apache-2.0
// What a thread block of the backward makes of its keys before the first tile: the operand of dQ,
// and the codes of V in 16 bit for dP. It has them for itself, so a pass of their own would only
// move them through memory.
#pragma once

#include <cstdint>

#include "cuda/arch/mbarrier.cuh"
#include "cuda/arch/wgmma.cuh"
#include "cuda/sm90/bwd/work.cuh"
#include "cuda/tile/codes.cuh"
#include "numerics/quantize.h"

namespace sagebwd::cuda::sm90::bwd {

/// The operand of dQ from K8, by a warpgroup. Keys are made again from codes, without the mean of a
/// sample of all keys; then they have one scale for all, so that dS needs no factor per key. Those
/// that hold NaN or Inf become zero.
///
/// Two slabs of 64 keys with a row per channel. Keys have the order of tile::permuted, 16 at a
/// time, and channels that of tile::turned_row, so that a lane's sums of dQ are neighbours.
template <int D>
struct KeysAgain {
  const uint8_t* from;
  const float* scales;  // of K8
  uint32_t thread;
  float base[4];  // of the thread's channels: the centre minus the mean

  __device__ KeysAgain(const uint8_t* k8, const float* k_scales, const int8_t* centre8,
                       float centre_scale, const float* mean, uint32_t number)
      : from(k8), scales(k_scales), thread(number) {
    static_assert(kWarpgroup % (D / 4) == 0, "all pieces of a thread have the same channels");
#pragma unroll
    for (uint32_t c = 0; c < 4; ++c)
      base[c] = fmaf(centre_scale, centre8[word() * 4 + c], -mean[word() * 4 + c]);
  }
  __device__ uint32_t word() const { return thread % (D / 4); }

  /// use(e, numbers of the thread's channels) for the e-th of four keys: those at place 4·w of a
  /// piece of 16.
  template <typename Use>
  __device__ __forceinline__ void four_keys(uint32_t piece, int w, Use use) const {
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      const uint32_t key = piece * 16 + static_cast<uint32_t>(tile::permuted(4 * w + e)),
                     codes = *reinterpret_cast<const uint32_t*>(
                         from + arch::swizzled<D>(key * D + word() * 4));
      const float scale = scales[key];
      float x[4];
      tile::unpack_codes(x, codes);
#pragma unroll
      for (int c = 0; c < 4; ++c) x[c] = fmaf(scale, x[c], base[c]);
      use(e, x);
    }
  }

  /// Returns the scale. tops: a word of shared memory for each warp.
  __device__ __forceinline__ float write(uint8_t* to, uint32_t (&tops)[kWarpgroup / 32]) const {
    constexpr uint32_t kPieces = kKeys / 16, kStep = kWarpgroup / (D / 4);
    float top = 0.0f;
#pragma unroll 1
    for (uint32_t piece = thread / (D / 4); piece < kPieces; piece += kStep)
#pragma unroll
      for (int w = 0; w < 4; ++w)
        four_keys(piece, w, [&](int, const float(&x)[4]) {
#pragma unroll
          for (float number : x) top = fmaxf(top, fabsf(number));  // without NaN
        });
    const uint32_t most = __reduce_max_sync(0xffffffffu, __float_as_uint(top));
    if (thread % 32 == 0) tops[thread / 32] = most;
    meet(Meeting::dq_maker);
    const float scale = numerics::scale_of(
                    __uint_as_float(max(max(tops[0], tops[1]), max(tops[2], tops[3])))),
                inverse = numerics::inverse_of(scale);
#pragma unroll 1
    for (uint32_t piece = thread / (D / 4); piece < kPieces; piece += kStep) {
      uint32_t turned[4][4];  // [channel][word]
#pragma unroll
      for (int w = 0; w < 4; ++w) {
        float x[4][4];  // [channel][key]
        four_keys(piece, w, [&](int e, const float(&of_key)[4]) {
#pragma unroll
          for (int c = 0; c < 4; ++c) x[c][e] = __fmul_rn(of_key[c], inverse);
        });
#pragma unroll
        for (int c = 0; c < 4; ++c)  // NaN becomes 0
          turned[c][w] = arch::to_bytes<arch::Bytes::s8>(x[c][0], x[c][1], x[c][2], x[c][3]);
      }
#pragma unroll
      for (uint32_t c = 0; c < 4; ++c) {
        const auto row = static_cast<uint32_t>(tile::turned_row(static_cast<int>(word() * 4 + c)));
        *reinterpret_cast<uint4*>(to + piece / 4 * (D * kSlab) +
                                  arch::swizzled<kSlab>(row * kSlab + piece % 4 * 16)) =
            make_uint4(turned[c][0], turned[c][1], turned[c][2], turned[c][3]);
      }
    }
    return scale;
  }
};

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
