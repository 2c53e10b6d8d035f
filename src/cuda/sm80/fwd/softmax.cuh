// SPDX-License-Identifier: Apache-2.0
// The online softmax: what a row carries from tile to tile, and P of one tile.
//
// A tile's P is relative to the row's largest logit in that tile, because its codes need that. O
// and the row sums are relative to a reference exponent. It moves only when the row's maximum grows
// by more than kSlack, a factor of 256, so O is rarely rescaled.
#pragma once

#include <cmath>
#include <cstddef>

#include "cuda/arch/scalar.cuh"
#include "cuda/sm80/fwd/scores.cuh"
#include "cuda/tile/codes.cuh"
#include "cuda/tile/softcap.cuh"

namespace sagebwd::cuda::sm80::fwd {

inline constexpr float kSlack = 8.0f;  // in log2

/// How P·V of a tile is multiplied.
enum class Product { int8, floating };

/// What one tile has for each of a lane's two rows. Logits are in log2 units.
struct TileRows {
  PerRow top;     // largest exponent: a logit, plus log2 of V's scale where that is folded in
  PerRow mass;    // this lane's share of the sum of levels·P
  PerRow weight;  // what carries the tile over to the reference exponent
};

/// What a lane's two rows carry from tile to tile. Logits are in log2 units.
template <Config kConfig>
struct Accumulators {
  static constexpr int kChannelBlocks = kConfig.channel_blocks();
  PerRow reference;  // exponent that O and the sums are relative to
  PerRow sum;        // this lane's share of the row sum, over keys of the octave that is visited
  float o[kChannelBlocks][4];
  PerRow starts;  // what the starts of integer sums have added to O (tile/codes.cuh)

  __device__ Accumulators() {
#pragma unroll
    for (int r = 0; r < 2; ++r) reference[r] = -INFINITY, sum[r] = starts[r] = 0.0f;
#pragma unroll
    for (int c = 0; c < kChannelBlocks; ++c)
#pragma unroll
      for (int e = 0; e < 4; ++e) o[c][e] = 0.0f;
  }

  /// Takes the starts off O.
  __device__ void settle() {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
#pragma unroll
      for (int c = 0; c < kChannelBlocks; ++c)
        o[c][2 * r] -= starts[r], o[c][2 * r + 1] -= starts[r];
      starts[r] = 0.0f;
    }
  }

  /// Whether a row has outgrown its reference exponent. NaN has.
  __device__ bool outgrown(const TileRows& rows, int r) const {
    return !(rows.top[r] <= reference[r] + kSlack);
  }

  /// Moves the reference exponent of rows that have outgrown it.
  template <Product kProduct>
  __device__ void rescale(const TileRows& rows, const Thread<kConfig>& me) {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const bool moves = outgrown(rows, r);
      const float shrink = !moves ? 1.0f
                           : reference[r] == -INFINITY
                               ? 0.0f
                               : arch::exp2_approx(reference[r] - rows.top[r]);
      reference[r] = moves ? rows.top[r] : reference[r];
      sum[r] *= shrink;
      if constexpr (kConfig.has_centres())
        if (me.t() == 0) me.sum_before(r) *= shrink;
#pragma unroll
      for (int c = 0; c < kChannelBlocks; ++c) o[c][2 * r] *= shrink, o[c][2 * r + 1] *= shrink;
      if constexpr (kProduct == Product::int8) starts[r] *= shrink;
    }
  }

  /// Carries a tile over to the reference exponent. Products in INT8 come before those in 16 bit,
  /// and then there are no starts left.
  template <Product kProduct>
  __device__ void carry_over(TileRows& rows, const Thread<kConfig>& me) {
    bool move = false;
#pragma unroll
    for (int r = 0; r < 2; ++r) move |= outgrown(rows, r);
    if (__any_sync(0xffffffffu, move)) rescale<kProduct>(rows, me);
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      rows.weight[r] =
          rows.top[r] == -INFINITY ? 0.0f : arch::exp2_approx(rows.top[r] - reference[r]);
      rows.mass[r] *= rows.weight[r];
    }
  }

  __device__ void add_mass(const TileRows& rows) {
#pragma unroll
    for (int r = 0; r < 2; ++r) sum[r] += rows.mass[r];
  }
};

/// The largest of three.
__device__ inline float largest(float a, float b, float c) { return fmaxf(a, fmaxf(b, c)); }

/// The largest number of each row; all lanes of the row get it.
template <Config kConfig>
__device__ void row_tops(PerRow& top, const Scores<kConfig>& x) {
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    float best[2] = {-INFINITY, -INFINITY};
#pragma unroll
    for (int n = 0; n < kConfig.key_blocks(); ++n) {
      best[n & 1] = largest(best[n & 1], x[n][2 * r], x[n][2 * r + 1]);
    }
    top[r] = tile::quad_max(fmaxf(best[0], best[1]));
  }
}

/// Adds log2 of V's scales to logits: scores become exponents, x·factor + log2. A cap comes before,
/// and wants the logit of the centre.
template <Config kConfig>
__device__ void fold(Scores<kConfig>& x, const Queries<kConfig>& queries, const Thread<kConfig>& me,
                     uint32_t scales) {
  if constexpr (kConfig.capped) {
#pragma unroll
    for (int n = 0; n < kConfig.key_blocks(); ++n)
#pragma unroll
      for (int e = 0; e < 4; ++e)
        x[n][e] = tile::capped(me.p.cap,
                               fmaf(x[n][e], queries.logit_factor[e >> 1], queries.centre[e >> 1]));
  }
#pragma unroll
  for (int n = 0; n < kConfig.key_blocks(); n += 2) {
    const float4 v = at<float4>(scales + offsetof(TileFolded<kConfig>, exponent) + n * 32);
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      const float factor = kConfig.capped ? 1.0f : queries.logit_factor[e >> 1];
      x[n][e] = fmaf(x[n][e], factor, e & 1 ? v.y : v.x);
      x[n + 1][e] = fmaf(x[n + 1][e], factor, e & 1 ? v.w : v.z);
    }
  }
}

/// Notes the largest logits, for calls that want them. A row has one lane that writes.
template <Config kConfig>
__device__ void note_logits(const Scores<kConfig>& x, const Queries<kConfig>& queries,
                            uint32_t scales, const Thread<kConfig>& me) {
  Scores<kConfig> y;
#pragma unroll
  for (int n = 0; n < kConfig.key_blocks(); ++n)
#pragma unroll
    for (int e = 0; e < 2; ++e) {
      float folded = 0.0f;
      // Volatile, or what `fold` has read would stay in registers for this.
      if constexpr (kConfig.folds_v())
        folded = at<const volatile float>(scales + offsetof(TileFolded<kConfig>, exponent) +
                                          n / 2 * 64 + n % 2 * 8 + e * 4);
      y[n][e] = x[n][e] - folded, y[n][e + 2] = x[n][e + 2] - folded;
    }
  PerRow top;
  row_tops<kConfig>(top, y);
  if (me.t() != 0) return;
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    float logit = kConfig.folds_v() ? top[r] : top[r] * queries.logit_factor[r];
    if constexpr (kConfig.has_centres() && !kConfig.capped) logit += queries.centre[r];
    if (top[r] != -INFINITY) me.logit_top(r) = fmaxf(me.logit_top(r), logit);
  }
}

/// Scores become levels·P, where P = 2^(exponent - largest of the row in this tile). Codes round
/// that. `stage` has the tile's scales.
template <Config kConfig>
__device__ void softmax(Scores<kConfig>& x, TileRows& rows, const Thread<kConfig>& me,
                        const Queries<kConfig>& queries, int stage, int tile) {
  using Stage = typename SharedPlan<kConfig>::Stage;
  constexpr int kKeyBlocks = kConfig.key_blocks();
  constexpr bool kFolds = kConfig.folds_v();
  constexpr float kBias = kFolds ? FoldedScales::kBias : 0.0f;
  const uint32_t scales = me.stage_at(stage) + offsetof(Stage, folded) + me.t() * 16;
  if constexpr (kFolds) fold(x, queries, me, scales);
  if (!me.work().plain.holds(tile)) {  // one branch, seldom taken
    // Behind the scales, because a hidden key may have the scale NaN.
    if (!me.work().whole.holds(tile)) hide(x, me, tile);
    if (me.p.max_logit != nullptr) note_logits(x, queries, scales, me);
  }

  PerRow most, shift;
  row_tops<kConfig>(most, x);
  // P is the exponential of x·factor + shift. The shift is rounded down, so that no P exceeds the
  // levels, and the row's exponent is what the rounded shift makes it.
  const float log_levels = me.work().log_levels;
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    const bool none = most[r] == -INFINITY;
    shift[r] =
        none ? 0.0f : __fmaf_rd(-most[r], kFolds ? 1.0f : queries.logit_factor[r], log_levels);
    rows.top[r] = none ? -INFINITY : log_levels - (shift[r] + kBias);
    // The same for all keys of the tile, so P does not know it.
    if constexpr (kConfig.has_centres() && !kConfig.capped)
      if (!none) rows.top[r] += queries.centre[r];
  }
  float total[2][2] = {};  // two sums of a row side by side: one alone would wait for itself
#pragma unroll
  for (int n = 0; n < kKeyBlocks; n += 2) {
    float4 inverse;
    if constexpr (kFolds)
      inverse = at<float4>(scales + offsetof(TileFolded<kConfig>, inverse) + n * 32);
#pragma unroll
    for (int h = 0; h < 2; ++h)
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        float& y = x[n + h][e];
        float& sum = total[e >> 1][e & 1];
        if constexpr (kFolds) {
          y = arch::exp2_approx(y + shift[e >> 1]);
          sum = fmaf(y, h == 0 ? (e & 1 ? inverse.y : inverse.x) : (e & 1 ? inverse.w : inverse.z),
                     sum);
        } else {
          y = arch::exp2_approx(fmaf(y, queries.logit_factor[e >> 1], shift[e >> 1]));
          sum += y;
        }
      }
  }
#pragma unroll
  for (int r = 0; r < 2; ++r) rows.mass[r] = total[r][0] + total[r][1];
}

}  // namespace sagebwd::cuda::sm80::fwd
