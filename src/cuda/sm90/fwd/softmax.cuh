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
/// From scores to logits. The keys of a tile may be of several blocks, each with its scale of K.
template <int kParts>
using Factors = float[kParts][2];

/// log2 of P at the reference: half precision then keeps 11 bits down to 2^-22 of the largest P and
/// some bits to 2^-32. A thread adds 16 pairs of them in half precision, so that sums are at most
/// 2^13 at the reference; kTooLarge leaves them room to grow.
inline constexpr float kBias = 8.0f, kTooLarge = 0x1p15f;
/// A reference that no row has: exponentials relative to it are infinite, hence too large.
inline constexpr float kNoReference = -1e30f;
/// A masked score. Adding kMagic makes the bits of -inf of it.
inline constexpr int kHidden = static_cast<int>(0xff800000u - static_cast<uint32_t>(tile::kMagic));

/// The largest logit of row r in a tile; all lanes of the row get it. kNoReference if there is
/// none.
template <int kParts>
__device__ inline float row_top(const Scores& x, int r, const Factors<kParts>& factor) {
  constexpr int kEach = 16 / kParts;
  float top = kNoReference;
#pragma unroll
  for (int part = 0; part < kParts; ++part) {
    int most = kHidden;
#pragma unroll
    for (int i = 0; i < kEach; ++i) {
      const int at = 4 * (part * kEach + i) + 2 * r;
      most = max(most, max(x[at], x[at + 1]));
    }
    most = max(most, __shfl_xor_sync(0xffffffffu, most, 1));
    most = max(most, __shfl_xor_sync(0xffffffffu, most, 2));
    const float here = most == kHidden ? kNoReference : static_cast<float>(most) * factor[part][r];
    top = part == 0 ? here : fmaxf(top, here);
  }
  return top;
}

/// What a thread's two rows carry from tile to tile.
template <int D>
struct Sums {
  float o[D / 2];    // element 4·j + 2·r + e: row r, channel 8·j + 2·(lane % 4) + e
  PerRow sum;        // this lane's share of the sum of P
  PerRow reference;  // in log2 units

  __device__ Sums() {
#pragma unroll
    for (int i = 0; i < D / 2; ++i) o[i] = 0.0f;
#pragma unroll
    for (int r = 0; r < 2; ++r) sum[r] = 0.0f, reference[r] = kNoReference;
  }

  /// The first references: the largest logits of the first tile.
  template <int kParts>
  __device__ void start(const Scores& x, const Factors<kParts>& factor) {
#pragma unroll
    for (int r = 0; r < 2; ++r) reference[r] = row_top(x, r, factor);
  }
  /// Raises the references to the largest logits of a tile. factor: from scores to logits.
  template <int kParts>
  __device__ void raise(const Scores& x, const Factors<kParts>& factor) {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const float top = row_top(x, r, factor);
      const float now = top > reference[r] ? top : reference[r];
      const float shrink = arch::exp2_approx(reference[r] - now);
      reference[r] = now, sum[r] *= shrink;
#pragma unroll
      for (int i = 0; i < D / 2; ++i)
        if ((i & 2) == 2 * r) o[i] *= shrink;
    }
  }
};

/// P of a tile in half precision: element 2·j + r is row r, keys 8·j + 2·(lane % 4) and the next.
using Halves = uint32_t[32];

/// Scores become P. `sum`: this lane's sums.
template <int kParts>
__device__ __forceinline__ void exponentials(Halves& p, PerRow& sum, const Scores& x,
                                             const Factors<kParts>& factor,
                                             const PerRow& reference) {
  float shift[kParts][2];
#pragma unroll
  for (int part = 0; part < kParts; ++part)
#pragma unroll
    for (int r = 0; r < 2; ++r)
      shift[part][r] = fmaf(-tile::kMagicFloat, factor[part][r], kBias - reference[r]);
  // Two sums of a row side by side: half precision drops less of shorter ones, and neither waits
  // for the other.
  uint32_t total[2][2] = {};
#pragma unroll
  for (int j = 0; j < 16; ++j)
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const int part = j * kParts / 16;
      float y[2];
#pragma unroll
      for (int e = 0; e < 2; ++e)
        y[e] = arch::exp2_approx(fmaf(__int_as_float(x[4 * j + 2 * r + e] + tile::kMagic),
                                      factor[part][r], shift[part][r]));
      p[2 * j + r] = arch::half2_of(y[0], y[1]);
      total[r][j % 2] = arch::half2_add(total[r][j % 2], p[2 * j + r]);
    }
#pragma unroll
  for (int r = 0; r < 2; ++r) sum[r] = arch::half2_sum(arch::half2_add(total[r][0], total[r][1]));
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
