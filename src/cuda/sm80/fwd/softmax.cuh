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
  // This lane's share of the row sum, and of that part of it whose tiles multiplied V itself
  // instead of V minus its mean.
  PerRow sum, sum_16;
  float o[kChannelBlocks][4];
  PerRow starts;  // what the starts of integer sums have added to O (tile/codes.cuh)

  __device__ Accumulators() {
#pragma unroll
    for (int r = 0; r < 2; ++r)
      reference[r] = -INFINITY, sum[r] = sum_16[r] = starts[r] = 0.0f;
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
  __device__ void rescale(const TileRows& rows) {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const bool moves = outgrown(rows, r);
      const float shrink = !moves ? 1.0f
                           : reference[r] == -INFINITY
                               ? 0.0f
                               : arch::exp2_approx(reference[r] - rows.top[r]);
      reference[r] = moves ? rows.top[r] : reference[r];
      sum[r] *= shrink;
      if constexpr (kProduct == Product::floating) sum_16[r] *= shrink;
#pragma unroll
      for (int c = 0; c < kChannelBlocks; ++c) o[c][2 * r] *= shrink, o[c][2 * r + 1] *= shrink;
      if constexpr (kProduct == Product::int8) starts[r] *= shrink;
    }
  }

  /// Carries a tile over to the reference exponent. Products in INT8 come before those in 16 bit:
  /// until then sum_16 is zero, and afterwards starts are.
  template <Product kProduct>
  __device__ void carry_over(TileRows& rows) {
    bool move = false;
#pragma unroll
    for (int r = 0; r < 2; ++r) move |= outgrown(rows, r);
    if (__any_sync(0xffffffffu, move)) rescale<kProduct>(rows);
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
  /// The same for a tile in 16 bit. `is_new`: its mass has not been counted in INT8. `whole_v`: it
  /// multiplies V itself.
  __device__ void add_mass_16(const TileRows& rows, bool is_new, bool whole_v) {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      if (whole_v) sum_16[r] += rows.mass[r];
      if (is_new) sum[r] += rows.mass[r];
    }
  }
};

/// The largest of each row's scores in a tile; all lanes of the row get it.
template <Config kConfig>
__device__ void row_tops(PerRow& top, const Scores<kConfig>& x) {
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    float best[2] = {-INFINITY, -INFINITY};
#pragma unroll
    for (int n = 0; n < kConfig.key_blocks(); ++n)
      best[n & 1] = fmaxf(best[n & 1], fmaxf(x[n][2 * r], x[n][2 * r + 1]));
    top[r] = tile::quad_max(fmaxf(best[0], best[1]));
  }
}

/// Notes the largest logits, for calls that want them. A row has one lane that writes.
template <Config kConfig>
__device__ void note_logits(const PerRow& top, const Thread<kConfig>& me,
                            const Queries<kConfig>& queries) {
  if (me.t() != 0) return;
#pragma unroll
  for (int r = 0; r < 2; ++r)
    if (top[r] != -INFINITY)
      me.logit_top(r) = fmaxf(me.logit_top(r), top[r] * queries.logit_factor[r]);
}

/// Scores become levels·P, where P = 2^(exponent - largest of the row in this tile). Codes round
/// that. `stage` has the tile's scales of V.
template <Config kConfig>
__device__ void softmax(Scores<kConfig>& x, TileRows& rows, const Thread<kConfig>& me,
                        const Queries<kConfig>& queries, int stage) {
  using Stage = typename SharedPlan<kConfig>::Stage;
  constexpr int kKeyBlocks = kConfig.key_blocks();
  constexpr bool kFolds = kConfig.folds_v();
  const uint32_t scales = me.stage_at(stage) + me.t() * 8;  // of the lane's two keys of a block
  PerRow most, shift;
  if (!kFolds || me.p.max_logit != nullptr) {
    row_tops<kConfig>(most, x);
    if (me.p.max_logit != nullptr) note_logits(most, me, queries);
  }
  if constexpr (kFolds) {
#pragma unroll
    for (int n = 0; n < kKeyBlocks; ++n) {
      const float2 v = at<float2>(scales + offsetof(Stage, v_log2) + n * 32);
#pragma unroll
      for (int e = 0; e < 4; ++e)
        x[n][e] = fmaf(x[n][e], queries.logit_factor[e >> 1], e & 1 ? v.y : v.x);
    }
    row_tops<kConfig>(most, x);
  }
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    const float factor = kFolds ? 1.0f : queries.logit_factor[r];
    rows.top[r] = most[r] == -INFINITY ? -INFINITY : most[r] * factor;
    shift[r] = most[r] == -INFINITY ? 0.0f : me.work().log_levels - rows.top[r];
  }
  float total[2][2] = {};  // two sums of a row side by side: one alone would wait for itself
#pragma unroll
  for (int n = 0; n < kKeyBlocks; ++n) {
    float2 inverse{};
    if constexpr (kFolds) inverse = at<float2>(scales + offsetof(Stage, v_inverse) + n * 32);
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      if constexpr (kFolds) {
        x[n][e] = arch::exp2_approx(x[n][e] + shift[e >> 1]);
        total[e >> 1][e & 1] = fmaf(x[n][e], e & 1 ? inverse.y : inverse.x, total[e >> 1][e & 1]);
      } else {
        x[n][e] = arch::exp2_approx(fmaf(x[n][e], queries.logit_factor[e >> 1], shift[e >> 1]));
        total[e >> 1][e & 1] += x[n][e];
      }
    }
  }
#pragma unroll
  for (int r = 0; r < 2; ++r) rows.mass[r] = total[r][0] + total[r][1];
}

}  // namespace sagebwd::cuda::sm80::fwd
