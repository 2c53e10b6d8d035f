// SPDX-License-Identifier: Apache-2.0
// The softmax of one tile, 64 queries x 128 keys of a warpgroup.
//
// P is relative to a reference exponent of its row, as O and the row sum are: P = 2^(logit -
// reference + kBias). The reference is the row's largest logit at some earlier time. It moves only
// when half-precision sums would grow too large, so most tiles need no maximum before their
// exponentials, and O is rarely rescaled. P is rounded to half precision; its codes need the
// largest P·(share of V's scale) of the row in this tile, which packed instructions find.
#pragma once

#include <cmath>
#include <cstdint>

#include "cuda/arch/half2.cuh"
#include "cuda/arch/scalar.cuh"
#include "cuda/sm90/codes.cuh"
#include "cuda/sm90/fwd/shared.cuh"
#include "cuda/tile/codes.cuh"

namespace sagebwd::cuda::sm90::fwd {

using PerRow = float[2];  // rows lane/4 and lane/4 + 8 of the warp's 16
using Scores = int[64];   // element 4·j + 2·r + e: row r, key 8·j + 2·(lane % 4) + e

/// log2 of P at the reference: half precision then keeps 11 bits down to 2^-22 of the largest P and
/// some bits to 2^-32. A thread adds 16 pairs of them in half precision, so that sums are at most
/// 2^13 at the reference; kTooLarge leaves them room to grow.
inline constexpr float kBias = 8.0f, kTooLarge = 0x1p15f;
/// A reference that no row has: exponentials relative to it are infinite, hence too large.
inline constexpr float kNoReference = -1e30f;
/// A masked score. Adding kMagic makes the bits of -inf of it.
inline constexpr int kHidden = static_cast<int>(0xff800000u - static_cast<uint32_t>(tile::kMagic));

/// What a thread's two rows carry from tile to tile.
template <int D>
struct Sums {
  float o[D / 2];  // element 4·j + 2·r + e: row r, channel 8·j + 2·(lane % 4) + e
  PerRow sum;      // this lane's share of the sum of P

  __device__ Sums() {
#pragma unroll
    for (int i = 0; i < D / 2; ++i) o[i] = 0.0f;
#pragma unroll
    for (int r = 0; r < 2; ++r) sum[r] = 0.0f;
  }
};

/// P of a tile in half precision: element 2·j + r is row r, keys 8·j + 2·(lane % 4) and the next.
using Halves = uint32_t[32];

/// Multiplies P by V's share. share(i): that of the lane's keys among the i-th 16.
template <typename Share>
__device__ __forceinline__ void multiply_by_shares(Halves& p, Share share) {
#pragma unroll
  for (int i = 0; i < 8; ++i) {  // 16 keys
    const uint2 s = share(i);
#pragma unroll
    for (int e = 0; e < 2; ++e)
#pragma unroll
      for (int r = 0; r < 2; ++r)
        p[4 * i + 2 * e + r] = arch::half2_mul(p[4 * i + 2 * e + r], e == 0 ? s.x : s.y);
  }
}

/// What makes codes of P times V's share.
__device__ __forceinline__ RowScales scales_of(const Halves& p) {
  uint32_t most[2] = {0, 0};
#pragma unroll
  for (int i = 0; i < 8; ++i)
#pragma unroll
    for (int r = 0; r < 2; ++r)
      most[r] = arch::half2_max(arch::half2_max(most[r], p[4 * i + r]), p[4 * i + 2 + r]);
  // A tile whose P is all below 2^-16 of the row's reference has fewer levels; its codes then count
  // steps of 2^-24.
  return row_scales<255>(row_tops(most[0], most[1]));
}

/// The shares of a lane's keys among 16.
__device__ __forceinline__ uint2 share_of(const __half* share, int i, uint32_t lane) {
  return *reinterpret_cast<const uint2*>(share + i * 16 + lane % 4 * 4);
}

/// Codes of P times V's share: A operands.
__device__ __forceinline__ void make_codes(uint32_t (&codes)[16], const Halves& p,
                                           const RowScales& scales) {
#pragma unroll
  for (int i = 0; i < 8; ++i)
#pragma unroll
    for (int r = 0; r < 2; ++r)
      codes[2 * i + r] =
          arch::half2_codes<arch::Bytes::u8>(p[4 * i + r], p[4 * i + 2 + r], scales.factor[r]);
}

/// What those codes round away, as codes of their own. One is worth 1/kRestLevels of the others.
inline constexpr float kRestLevels = 254.0f;
__device__ __forceinline__ void make_rest(uint32_t (&codes)[16], const Halves& p,
                                          const RowScales& scales) {
  constexpr uint32_t kStart = 0x64006400u, kMinusStart = 0xe400e400u;  // 1024: see half2_codes
  constexpr uint32_t kMinusOne = 0xbc00bc00u, kLevels = 0x5bf05bf0u;   // 254
  const auto rest = [](uint32_t x, uint32_t factor) {
    const uint32_t code = arch::half2_add(arch::half2_fma(x, factor, kStart), kMinusStart);
    return arch::half2_fma(x, factor, arch::half2_mul(code, kMinusOne));
  };
#pragma unroll
  for (int i = 0; i < 8; ++i)
#pragma unroll
    for (int r = 0; r < 2; ++r)
      codes[2 * i + r] = arch::half2_codes<arch::Bytes::s8>(
          rest(p[4 * i + r], scales.factor[r]), rest(p[4 * i + 2 + r], scales.factor[r]), kLevels);
}

}  // namespace sagebwd::cuda::sm90::fwd
