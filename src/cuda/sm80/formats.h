// SPDX-License-Identifier: Apache-2.0
// What the operand kernel writes beside codes: scales, and numbers of each query, in the form in
// which the main kernels read them.
#pragma once

#include "cuda/tile/layout.h"
#include "cuda/tuned/formats.h"

namespace sagebwd::cuda::sm80 {

using tuned::KeyScale, tuned::QueryRow;

/// The scales of V that are folded into P, of kBlock keys; 1 where none is. Of each 16 keys, key
/// tile::permuted(i) has place i, so a lane reads its four with one load.
struct FoldedScales {
  static constexpr float kBias = 128.0f;  // on every exponent
  float exponent[kBlock];                 // log2 of the scale, plus kBias
  float inverse[kBlock];
};

/// What dK and dV need of a query. φ, the scale of its codes of dO, is part of the exponent of P:
///   φ·P = 2^(logit_factor·x - lse2)     φ·P·(dP·slope + offset) = dS·logit_factor
/// where x is the integer logit times the key's scale, and dP lacks what the centre of V adds to
/// it. Both factors are divided out again later, so neither may be 0: φ is tiny where dO = 0, and
/// logit_factor is tiny where Q = 0.
struct QueryExponent {
  float logit_factor, lse2;
};
struct QueryGradient {
  float slope, offset;
};

}  // namespace sagebwd::cuda::sm80
