// SPDX-License-Identifier: Apache-2.0
// What operand kernels write beside codes: scales, and numbers of each query, in the form in which
// the main kernels read them.
#pragma once

#include "cuda/tile/layout.h"
#include "cuda/tuned/centres.h"
#include "cuda/tuned/formats.h"

namespace sagebwd::cuda::sm90 {

using tuned::kCentreRows, tuned::QueryRow;

/// Octaves of 2^30 keys, the most that these kernels take.
inline constexpr int kMostOctaves = 24;

/// What a block of kBlock keys has for the forward, in one copy. Numbers of the keys are in the
/// order of tile::permuted, 16 at a time. Keys behind the end have some, too.
struct KeyNumbers {
  // Of K: never 0, so that a hidden score, which is -inf, stays -inf. kZeroScale where all codes
  // are 0, kPoisonedScale where the key holds NaN or Inf.
  float k[128];
  float v[128];               // of V; 0 of a poisoned key alone
  unsigned short share[128];  // halves: the scale of V, divided by the block's largest
  // The largest scale of V, and whether a key holds NaN or Inf. 16 bytes, because copies have so
  // many at least.
  struct OfBlock {
    float v;
    uint32_t v_poisoned;
    uint32_t k_poisoned[2];  // parts of it from each warp that made codes
    __device__ bool is_poisoned() const {
      return (v_poisoned | k_poisoned[0] | k_poisoned[1]) != 0;
    }
  } block;
};
/// No key has it, because scales end at 2^-100 / 127.
inline constexpr float kPoisonedScale = 0x1p-126f;

/// Queries of a tile of the backward: fewer channels leave registers for more queries. They share a
/// scale of P for dV, per key. For dK those of a slab share a scale of dS.
constexpr int backward_queries(int d) { return d == 64 ? 128 : 64; }

/// What 64 queries (a slab) have for the backward, where P and dS are halves. Numbers of the
/// queries are in the order of tile::permuted, 16 at a time. With the scores x times the scales of
/// their keys,
///   2^15·P·φ/φ̂ = 2^(factor·x + exponent)      2^15·σ·dS·L/L̂ = that·(slope·dP + offset)
/// where L is the logit factor, φ the scale of the codes of dO, dP that of codes of V, hats are
/// maxima over the tile, and σ keeps slope·dP + offset below 2. Queries without keys and after the
/// end have exponent -inf, slope 0 and offset 0.
struct QueryStats {
  float factor[64], slope[64];
  float dv_unit;  // φ̂/2^15
  float ds_unit;  // L̂/(2^15·σ)
  float unused[2];
};
/// What they have for the keys of an octave: the exponent has the logit of the centre of K, and the
/// offset dO times the centre of V. A thread block needs those of one octave alone.
struct OctaveStats {
  float exponent[64], offset[64];
};

/// The sums of dQ are those of 2^15·σ·dS·L/L̂ and of codes of K, in units of the largest scale of K
/// of the sequence, times 2^-8 and the query's lift. Rows of P sum to 1 at most, and the bracket is
/// below 2, so no sum is above 2^16·127·2^-8: half precision holds them. kDqUnit takes the powers
/// of two out again.
inline constexpr float kDqShift = 0x1p-8f, kDqUnit = 0x1p-15f / kDqShift;

}  // namespace sagebwd::cuda::sm90
