// SPDX-License-Identifier: Apache-2.0
// Scales of Q, K, V and dO from the largest magnitudes of their tokens. A token that holds NaN or
// Inf gets the scale NaN and takes no part in the scale of others.
#pragma once

#include <algorithm>

#include "numerics/quantize.h"

namespace sagebwd::cpu {

/// The largest magnitude among those that are finite.
inline float largest_finite(const float* amax, int count) {
  float top = 0.0f;
  for (int i = 0; i < count; ++i)
    if (numerics::is_finite(amax[i])) top = std::max(top, amax[i]);
  return top;
}

/// One scale per token, in place of the magnitudes.
inline void scale_tokens(float* amax, int count) {
  for (int i = 0; i < count; ++i) amax[i] = numerics::scale_of(amax[i]);
}

/// One scale for all of them, repeated for each.
inline void scale_together(float* amax, int count) {
  const float scale = numerics::scale_of(largest_finite(amax, count));
  for (int i = 0; i < count; ++i)
    amax[i] = numerics::is_finite(amax[i]) ? scale : numerics::scale_of(amax[i]);
}

/// The same in `vectorwise`: of a key, and of a token of V that is folded into P.
inline void scale_lone_keys(float* amax, int count) {
  for (int i = 0; i < count; ++i) amax[i] = numerics::key_scale_of(amax[i]);
}
inline void scale_lone_values(float* amax, int count) {
  for (int i = 0; i < count; ++i) amax[i] = numerics::lone_value_scale(amax[i]);
}

}  // namespace sagebwd::cpu
