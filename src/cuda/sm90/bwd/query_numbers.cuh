// SPDX-License-Identifier: Apache-2.0
// From the scales and dot products of a query to what the backward knows of it (QueryStats,
// QueryRow).
#pragma once

#include <cmath>

#include "cuda/arch/scalar.cuh"
#include "cuda/sm90/formats.h"
#include "cuda/tile/codes.cuh"
#include "numerics/quantize.h"

namespace sagebwd::cuda::sm90 {

struct QueryNumbers {
  float logit_factor;
  float lse2;   // +inf: no key is seen
  float delta;  // D, with -dLSE
  float dlse;
  float norm;   // of dO
  float scale;  // of the codes of dO; NaN: it holds NaN or Inf

  __device__ static float finite(float x) { return numerics::is_finite(x) ? x : 0.0f; }

  /// No dP is larger than this times the norm of dO. Nor is D, unless O is of more keys than V.
  /// `value_scale`: the largest of V of the sequence.
  template <int D>
  __device__ static float most_per_norm(float value_scale) {
    return numerics::kLevels * sqrtf(static_cast<float>(D)) * fmaxf(value_scale, 0x1p-100f);
  }

  __device__ bool sees() const { return lse2 != INFINITY; }
  __device__ bool counts() const { return sees() && scale > 0.0f; }

  /// φ as it counts for φ̂, the largest of a tile of queries.
  __device__ float phi() const { return sees() ? finite(scale) : 0.0f; }

  /// dLSE gives dS to queries with little or no dO. Their scale must not be tiny, and codes of so
  /// little dO need not be fine.
  __device__ void raise_scale(float phi_hat) {
    scale = arch::max_nan(scale, phi_hat > 0.0f ? phi_hat * 0x1p-6f : 1.0f);
  }

  __device__ float ratio() const { return counts() ? logit_factor / scale : 0.0f; }
  /// What dS times the ratio cannot exceed. `most`: most_per_norm.
  __device__ float bound(float ratio, float most) const {
    return ratio * fmaxf(fmaf(norm, most, fabsf(dlse)), finite(fabsf(delta)));
  }

  /// Of a tile.
  struct Largest {
    float phi, bound;
    __device__ float reference() const { return phi > 0.0f ? phi : 1.0f; }
  };

  /// What octaves have in common: the exponent and the offset without what centres add, and the
  /// slope, which is 0 where dP must not count, whatever it is.
  struct Common {
    float exponent, slope, offset;
  };
  /// `place`: the query's in the slab. `lift` and `row` are the query's own.
  __device__ Common write(QueryStats& stats, int place, float& lift, QueryRow& row, float ratio,
                          float bound, const Largest& of) const {
    const bool poisoned = sees() && scale != scale;
    const float slope = poisoned ? scale : of.bound > 0.0f ? ratio / of.bound : 0.0f;
    stats.factor[place] = logit_factor;
    stats.slope[place] = slope;
    // Queries with less dO than the largest have smaller sums. These are lifted, so that half
    // precision holds them all.
    lift = bound > 0.0f ? exp2f(floorf(fminf(log2f(of.bound / bound), 60.0f))) : 1.0f;
    row = {logit_factor * lift / (of.reference() * of.bound * kDqUnit), lse2};
    if (poisoned) return {scale, scale, scale};
    if (!counts()) return {-INFINITY, 0.0f, 0.0f};
    return {15.0f - lse2 + log2f(scale / of.reference()), slope, -delta * slope};
  }
  __device__ static void write_units(QueryStats& stats, const Largest& of) {
    stats.dv_unit = of.reference() * 0x1p-15f, stats.ds_unit = of.reference() * of.bound * 0x1p-15f;
  }
};

}  // namespace sagebwd::cuda::sm90
