// SPDX-License-Identifier: Apache-2.0
// The recipe oracle: attention of one head with every quantisation point of both recipes, as a
// plain scalar program. It keeps every code and scale, and hands every tile of S, P, dP and dS to a
// tap.
#pragma once

#include <cstdint>
#include <functional>
#include <vector>

#include "ref/visibility.h"
#include "sagebwd/recipe.h"

namespace sagebwd::ref {

/// The quantised inputs: made once, the same for forward and backward.
struct RecipeInputs {
  std::vector<int8_t> q8, k8, v8;       // [nq, d], [nk, d], [nk, dv]
  std::vector<float> q_scale, k_scale;  // per token (a block's scale repeated)
  // Per token, a block's scale repeated; NaN for a token that holds NaN or Inf. Never zero where it
  // is folded into P.
  std::vector<float> v_scale;
  // `paper` alone; zeros elsewhere and where nothing is smoothed.
  std::vector<float> mu_k;        // [d]
  std::vector<float> mu_q;        // [query tiles, d]
  std::vector<float> mean_logit;  // [nq]: what K-smoothing takes out of the logits of a row
  // `vectorwise` alone, of each octave of keys (numerics/octaves.h), of K and of V: codes
  // [octaves, d] and [octaves, dv], and scales.
  std::vector<int8_t> centre8, v_centre8;
  std::vector<float> centre_scale, v_centre_scale;
};

struct RecipeHead {
  int64_t nq = 0, nk = 0;
  int64_t d = 0, dv = 0;                // head dim of q and k; of v and o, 0: d
  const float* q = nullptr;             // [nq, d]
  const float* k = nullptr;             // [nk, d]
  const float* v = nullptr;             // [nk, dv]
  const RecipeInputs* codes = nullptr;  // in a backward, instead: what the forward made of them
  float scale = 1.0f;
  float softcap = 0.0f;  // 0: none
  Visibility visible;
  Recipe recipe;                   // tile sizes filled in
  int lead = 0;                    // leading entries of a list whose P is not quantised; -1: all
  int levels_of_p = 0;             // of the codes of P; 0: 255, in `paper` 127
  int64_t sequence = 0, head = 0;  // key of the dither

  int64_t value_dim() const { return dv == 0 ? d : dv; }
};

/// One tile as the forward or the backward saw it, row-major [rows, cols]; rows are queries.
/// Masked entries hold p = ds = 0, codes 0 and s2 = -inf; dp means nothing there.
/// Codes of a matmul that ran in floating point are null, and so are their scales. Undoing the
/// scales gives what the integer matmuls used:
///   forward   p  ≈ p8 · p_scale[row] / v_scale[col]
///   backward  p  ≈ p8 · p_scale[col] / do_scale[row]              (dV)
///             ds ≈ ds8_query · ds_scale_query[row] / k_fold[col]   (dQ)
///             ds ≈ ds8_key · ds_scale_key[col] / q_scale[row]      (dK)
struct RecipeTile {
  bool backward;
  int64_t q0, k0, rows, cols;
  const float *s2, *p;  // logits in log2 units, without the mean key's unless capped; p normalised:
                        // exp(S - LSE) in both directions
  const int16_t* p8;    // 0 … p_levels(head)
  const float* p_scale;  // forward: per row; backward: per key (column)
  const float* v_scale;  // forward: per key, what P was multiplied with; null: nothing
  // Backward only.
  const float *dp, *ds;
  const int16_t *ds8_query, *ds8_key;
  const float *ds_scale_query, *ds_scale_key;  // per row / per column
  const float *do_scale, *q_scale, *k_fold;    // of this tile's rows, rows and columns
};

struct RecipeForward {
  RecipeInputs inputs;
  std::vector<float> o, lse;  // [nq, dv] not rounded to the input dtype, [nq]
  float max_logit = 0;
};

struct RecipeBackwardIn {
  const float* o =
      nullptr;  // [nq, dv], as the caller hands it to the backward (rounded to the input dtype)
  const float* lse = nullptr;   // [nq]
  const float* dout = nullptr;  // [nq, dv]
  const float* dlse = nullptr;  // [nq] or null
  bool partial_kv = false;
};

struct RecipeBackward {
  RecipeInputs inputs;
  std::vector<int8_t> do8;
  std::vector<float> do_scale;    // per token
  std::vector<float> delta;       // D, [nq]
  std::vector<float> dq, dk, dv;  // [nq, d], [nk, d], [nk, dv]
};

using RecipeTap = std::function<void(const RecipeTile&)>;

/// Forward tiles reach the tap after the whole row block is done, when the final LSE is known.
RecipeForward recipe_forward(const RecipeHead& head, const RecipeTap& tap = {});
RecipeBackward recipe_backward(const RecipeHead& head, const RecipeBackwardIn& in,
                               const RecipeTap& tap = {});

}  // namespace sagebwd::ref
