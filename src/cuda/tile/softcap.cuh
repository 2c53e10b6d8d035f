// SPDX-License-Identifier: Apache-2.0
// Soft capping of logits in log2 units (numerics/softcap.h), by the fast instructions.
#pragma once

#include <cmath>

#include "cuda/arch/scalar.cuh"
#include "numerics/softcap.h"

namespace sagebwd::cuda::tile {

/// cap·tanh(x/cap), relative error below 1e-6; NaN stays NaN.
__device__ __forceinline__ float capped(const numerics::Softcap& c, float x) {
  const float u = x * c.inverse, square = u * u;
  const float e = arch::exp2_approx(fabsf(x) * c.decay);
  const float far = fmaf(-2.0f * e, arch::reciprocal_approx(1.0f + e), 1.0f);  // of |u|
  // Where e is near one that difference has lost its digits: an odd polynomial of u, fitted to
  // tanh for |u| < 0.55.
  float y = fmaf(1.6437575221061707e-2f, square, -5.2671812474727630e-2f);
  y = fmaf(y, square, 1.3320724666118622e-1f);
  y = fmaf(y, square, -3.3332946896553040e-1f);
  const float near = fmaf(y * square, u, u);
  return c.cap * (fabsf(u) > 0.55f ? copysignf(far, u) : near);
}

/// (y/cap)² of a capped logit y: what the derivative of the cap lacks to 1.
__device__ __forceinline__ float taken_by_cap(const numerics::Softcap& c, float y) {
  const float t = y * c.inverse;
  return fminf(t * t, 1.0f);
}

}  // namespace sagebwd::cuda::tile
