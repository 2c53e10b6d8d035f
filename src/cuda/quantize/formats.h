// SPDX-License-Identifier: Apache-2.0
// What the operand kernel writes beside codes: scales and per-query numbers, in the form in which
// main kernels read them.
#pragma once

namespace sagebwd::cuda {

/// Scale of a key's codes. An integer sum s arrives as the float 1.5·2^23 + s (tile/codes.cuh), and
/// one multiply-add makes scale·s of it: `offset` = -1.5·2^23·scale, exact because the scale is
/// rounded to 22 bits.
struct KeyScale {
  float scale, offset;
};

/// What the rows of dQ need: logit_factor as in the forward, lse2 = log2 of the sum over keys of
/// 2^s2 (+inf for rows without keys), delta = D.
struct QueryRow {
  float logit_factor, lse2, delta;
};

/// The same for dK and dV, with φ = the token scale of dO folded into the exponent of P:
///   φ·P = 2^(logit_factor·x - lse2)     φ·P·(dP·slope + offset) = dS·logit_factor
/// where x is the integer logit times the key's scale. A row with dO = 0 has a tiny φ instead, and
/// a row with Q = 0 a tiny logit_factor.
struct QueryExponent {
  float logit_factor, lse2;
};
struct QueryGradient {
  float slope, offset;
};

}  // namespace sagebwd::cuda
