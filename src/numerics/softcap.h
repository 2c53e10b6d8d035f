// SPDX-License-Identifier: Apache-2.0
// Soft capping: a logit x becomes y = cap·tanh(x/cap), with the derivative 1 − (y/cap)². Kernels
// have logits in log2 units, and so are x and y here.
//
// With e = e^(−2|x|/cap) the tanh is (1 − e)/(1 + e) and its derivative 4e/(1 + e)². The latter
// keeps its relative precision where the former is almost one.
#pragma once

#include <cmath>

#include "base/inline.h"
#include "numerics/quantize.h"

namespace sagebwd::numerics {

/// What kernels need of a cap. All numbers are zero where there is none.
struct Softcap {
  float cap;      // in log2 units
  float inverse;  // of that
  float decay;    // e = 2^(decay·|x|)

  SAGE_INLINE bool on() const { return cap != 0.0f; }
};

/// 0: none.
SAGE_INLINE Softcap softcap_of(float cap) {
  if (cap == 0.0f) return {0.0f, 0.0f, 0.0f};
  const double log2e = 1.0 / kLn2, wide = static_cast<double>(cap);
  return {static_cast<float>(wide * log2e), static_cast<float>(1.0 / (wide * log2e)),
          static_cast<float>(-2.0 / wide)};
}

SAGE_INLINE float capped(const Softcap& c, float x) { return c.cap * std::tanh(x * c.inverse); }

/// The derivative at x, not at the capped logit.
SAGE_INLINE float cap_slope(const Softcap& c, float x) {
  const float e = std::exp2(c.decay * std::fabs(x)), sum = 1.0f + e;
  return 4.0f * e / (sum * sum);
}

}  // namespace sagebwd::numerics
