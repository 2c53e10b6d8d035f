// SPDX-License-Identifier: Apache-2.0
// P times V's shares, and the codes of that. A share is a key's scale of V divided by the largest
// of some keys: by that of all 128 where each row sees them, else of each row by that of the keys
// that it sees. Codes need the largest product of the row, which packed instructions find.
#pragma once

#include <cstdint>

#include "cuda/arch/half2.cuh"
#include "cuda/arch/scalar.cuh"
#include "cuda/sm90/codes.cuh"
#include "cuda/sm90/fwd/rows.cuh"
#include "cuda/sm90/fwd/softmax.cuh"
#include "cuda/tile/codes.cuh"
#include "numerics/quantize.h"

namespace sagebwd::cuda::sm90::fwd {

/// The largest scale of V up to each of 128 keys, from the first one of its tile of kTile keys on,
/// by a warp: a lane has four keys.
template <int kTile>
__device__ __forceinline__ void find_prefixes(float* prefix, const float* v_scale, uint32_t lane) {
  constexpr uint32_t kLanes = kTile / 4;  // of a tile
  const auto two_at = [&](uint32_t key) {
    return *reinterpret_cast<const float2*>(
        v_scale + (key & ~15u) +
        static_cast<uint32_t>(tile::place_of(static_cast<int>(key & 15u))));
  };
  const float2 low = two_at(4 * lane), high = two_at(4 * lane + 2);
  float most[4] = {fmaxf(low.x, numerics::kLeastValueScale), low.y, high.x, high.y};
#pragma unroll
  for (int e = 1; e < 4; ++e) most[e] = fmaxf(most[e], most[e - 1]);
  float before = __shfl_up_sync(0xffffffffu, most[3], 1);
  if (lane % kLanes == 0) before = numerics::kLeastValueScale;
#pragma unroll
  for (uint32_t distance = 1; distance < kLanes; distance *= 2) {
    const float other = __shfl_up_sync(0xffffffffu, before, distance);
    if (lane % kLanes >= distance) before = fmaxf(before, other);
  }
  *reinterpret_cast<float4*>(prefix + 4 * lane) =
      make_float4(fmaxf(most[0], before), fmaxf(most[1], before), fmaxf(most[2], before),
                  fmaxf(most[3], before));
  __syncwarp();
}

/// The largest scale of V that a query sees in a tile of kTile keys. No scale is smaller than the
/// least that a value may have. end: of the keys. prefix, v_scale: of the tile.
template <int kTile>
__device__ __forceinline__ float value_top(const float* prefix, const float* v_scale,
                                           const tile::Band& band, int end, Corner at) {
  const int first = at.query + band.begin - at.key,
            last = min(min(at.query + band.end, end) - at.key, kTile) - 1;
  float top = last >= 0 ? prefix[last] : numerics::kLeastValueScale;
  if (first > 0) {  // a window hides the first keys
    top = numerics::kLeastValueScale;
#pragma unroll 1
    for (int key = first; key <= last; ++key)
      top = fmaxf(top, v_scale[(key & ~15) + tile::place_of(key & 15)]);
  }
  return top;
}

/// Notes the largest scales of V that a thread's rows see of 128 keys which the mask cuts, in tiles
/// of kTile. tops: that of the thread's first row. prefix: of the warp. at: of each tile.
template <int kTile>
__device__ __forceinline__ void note_value_tops(float* tops, float* prefix, const float* v_scale,
                                                const tile::Band& band, int end,
                                                const Corner (&at)[128 / kTile], uint32_t lane) {
  find_prefixes<kTile>(prefix, v_scale, lane);
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    float top = numerics::kLeastValueScale;
#pragma unroll
    for (int i = 0; i < 128 / kTile; ++i)
      top = fmaxf(top, value_top<kTile>(prefix + i * kTile, v_scale + i * kTile, band, end,
                                        {at[i].query + 8 * r, at[i].key}));
    if (lane % 4 == 0) tops[8 * r] = top;
  }
  __syncwarp();
}

/// Shares of V where all rows of a warp see all of 128 keys, as the kernel of codes makes them for
/// blocks. Notes the largest scale as note_value_tops does.
__device__ __forceinline__ void find_shares(__half* share, float* tops, const float* v_scale,
                                            uint32_t lane) {
  const float4 v = reinterpret_cast<const float4*>(v_scale)[lane];
  const float mine = fmaxf(fmaxf(v.x, v.y), fmaxf(fmaxf(v.z, v.w), numerics::kLeastValueScale)),
              top = __uint_as_float(__reduce_max_sync(0xffffffffu, __float_as_uint(mine))),
              inverse = arch::reciprocal_approx(top);
  reinterpret_cast<uint2*>(share)[lane] =
      make_uint2(arch::half2_of(value_share(v.x, inverse), value_share(v.y, inverse)),
                 arch::half2_of(value_share(v.z, inverse), value_share(v.w, inverse)));
  if (lane % 4 == 0) tops[0] = tops[8] = top;
  __syncwarp();
}

/// The shares of a lane's keys among 16.
__device__ __forceinline__ uint2 share_of(const __half* share, int i, uint32_t lane) {
  return *reinterpret_cast<const uint2*>(share + i * 16 + lane % 4 * 4);
}

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

/// Multiplies P by V's share where rows see different keys: each has shares of its own, relative to
/// the largest scale that it sees. They are the numbers that the kernel of codes has written
/// (value_share) for rows that see all of the tile. tops: those of the thread's first row.
__device__ __forceinline__ void multiply_by_own_shares(Halves& p, const float* tops,
                                                       const float* v_scale, uint32_t lane) {
  const PerRow inverse = {arch::reciprocal_approx(tops[0]), arch::reciprocal_approx(tops[8])};
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    const float4 scale = numbers_of(v_scale, i, lane);
#pragma unroll
    for (int b = 0; b < 2; ++b)
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        uint32_t& h = p[4 * i + 2 * b + r];
        h = arch::half2_mul(h, arch::half2_of(value_share(number_of(scale, b, 0), inverse[r]),
                                              value_share(number_of(scale, b, 1), inverse[r])));
      }
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
