// SPDX-License-Identifier: Apache-2.0
// What the operand kernel writes beside codes: scales, and numbers of each query, in the form in
// which the main kernels read them.
#pragma once

#include "cuda/tile/layout.h"

namespace sagebwd::cuda {

/// Scale of a key's codes. An integer sum s arrives as the float 1.5·2^23 + s (tile/codes.cuh). One
/// multiply-add makes scale·s of it, with `offset` = -1.5·2^23·scale. That product is exact,
/// because the scale is rounded to 22 bits. A poisoned key has the scale NaN and the offset of the
/// keys that it shares a scale with.
struct KeyScale {
  float scale, offset;
};

/// Scales of a tile of keys, for the forward. k: of K, where all keys of a tile share one; negative
/// if one of them is poisoned. v: factor of the codes of V; NaN if V of the tile is poisoned.
struct TileScale {
  float k, v;
};

/// The scales of V that are folded into P, of kBlock keys; 1 where none is. Of each 16 keys, key
/// tile::permuted(i) has place i, so a lane reads its four with one load.
struct FoldedScales {
  static constexpr float kBias = 128.0f;  // log2 of any scale is larger than -kBias
  float exponent[kBlock];                 // log2 of the scale, plus kBias
  float inverse[kBlock];
};

/// What dQ needs of a query. divisor: what its sums of dQ have to be divided by; for sm80 that is
/// its logit factor, the scale of its codes times c·log2 e. lse2: log2 of the sum over keys of
/// 2^logit, with the logit in log2 units; +inf for a query without keys, so that its P is 0.
struct QueryRow {
  float divisor, lse2;
};

/// What dK and dV need of a query. φ, the scale of its codes of dO, is part of the exponent of P:
///   φ·P = 2^(logit_factor·x - lse2)     φ·P·(dP·slope + offset) = dS·logit_factor
/// where x is the integer logit times the key's scale. Both factors are divided out again later, so
/// neither may be 0: φ is tiny where dO = 0, and logit_factor is tiny where Q = 0.
struct QueryExponent {
  float logit_factor, lse2;
};
struct QueryGradient {
  float slope, offset;
};

/// What a block of kBlock keys has for the kernels of sm90: the scale of its K, the largest scale
/// of its V, and whether a key holds NaN or Inf. 16 bytes, because copies have so many at least.
struct BlockScales {
  float k, v;
  int k_poisoned, v_poisoned;
};

/// Queries of a tile of the backward of sm90: fewer channels leave registers for more queries. They
/// share a scale of P for dV, per key. For dK those of a slab share a scale of dS.
constexpr int backward_queries(int d) { return d == 64 ? 128 : 64; }

/// What 64 queries (a slab) have for the backward of sm90, where P and dS are halves. Numbers of
/// the queries are in the order of tile::permuted, 16 at a time. With the scores x times the scale
/// of K,
///   2^15·P·φ/φ̂ = 2^(factor·x + exponent)      2^15·σ·dS·L/L̂ = that·(slope·dP + offset)
/// where L is the logit factor, φ the scale of the codes of dO, hats are maxima over the tile, and
/// σ keeps slope·dP + offset below 2. Queries without keys and after the end have exponent -inf and
/// slope 0.
struct QueryStats {
  float factor[64], exponent[64], slope[64], offset[64];
  float dv_unit;  // φ̂/2^15
  float ds_unit;  // L̂/(2^15·σ)
  float unused[2];
};

/// The sums of dQ of sm90 are those of 2^15·σ·dS·L/L̂ and of codes of K, in units of the largest
/// scale of K of the sequence, times 2^-8 and the query's lift. Rows of P sum to 1 at most, and the
/// bracket is below 2, so no sum is above 2^16·127·2^-8: half precision holds them. kDqUnit takes
/// the powers of two out again.
inline constexpr float kDqShift = 0x1p-8f, kDqUnit = 0x1p-15f / kDqShift;

/// Every key of the forward of sm90 has its share: its scale of V, divided by the block's largest,
/// in half precision. That of a poisoned key is -0.
inline constexpr unsigned short kPoisonedShare = 0x8000;

}  // namespace sagebwd::cuda
