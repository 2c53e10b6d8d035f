// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "numerics/quantize.h"

namespace sagebwd::cuda::tuned {

// Scale of Q or K where all codes are zero. The backward multiplies scales into dS and divides them
// out again, so a scale must not be 0. This one is too small to change the maxima of dS.
inline constexpr float kZeroScale = 0x1p-60f;

/// A scale of K as the kernels take it: rounded to 22 significant bits, so that the offset of a
/// KeyScale is exact; never 0.
__device__ inline float exact_scale(float scale) {
  if (numerics::is_finite(scale)) scale = __uint_as_float((__float_as_uint(scale) + 2u) & ~3u);
  return scale == 0.0f ? kZeroScale : scale;
}

}  // namespace sagebwd::cuda::tuned
