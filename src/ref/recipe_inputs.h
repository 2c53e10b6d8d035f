// SPDX-License-Identifier: Apache-2.0
// First step of the recipe oracle: means, smoothed copies and INT8 codes of Q, K, V and dO.
#pragma once

#include <vector>

#include "ref/attention_recipe.h"

namespace sagebwd::ref {

/// Codes of a [n, d] tensor with one scale per token, or per block of tokens repeated for each of
/// them.
struct TokenCodes {
  std::vector<int8_t> codes;
  std::vector<float> scale;  // [n]; NaN for a token that holds NaN or Inf, whose codes are 0
};
TokenCodes quantize_tokens(const float* x, int64_t n, int64_t d, int64_t tokens_per_scale);

/// The inputs in every form the matmuls need. Codes are kept as floats too: all sums of code
/// products stay below 2^24 (255·127·256), so FP32 adds them exactly and one plain matmul serves
/// integers and floats alike.
struct RecipeOperands {
  RecipeInputs inputs;
  std::vector<float> k_smooth;          // K, in `paper` without its mean
  std::vector<float> q8, k8, v8;        // codes; of rotated Q and K where the recipe says so
  std::vector<float> k8_t, k_smooth_t;  // [d, nk]
  std::vector<float> mu_q;              // RecipeInputs::mu_q, rotated as Q is
  std::vector<float> v_t;               // [dv, nk]: what dP multiplies dO with, V or its codes
  // What dS is multiplied with for dQ: codes [nk, d], the scale of each key that is folded into dS,
  // and what was subtracted from every key, not rotated. In `paper` those of S; in `vectorwise`
  // made again from the codes, with one scale for a tile of keys.
  std::vector<float> dq_keys, dq_fold, dq_mean;
};
RecipeOperands make_operands(const RecipeHead& head);

/// What the centre of a tile's keys adds to the logits of query i, in log2 units: 0 in `paper`.
float centre_logit(const RecipeHead& head, const RecipeInputs& in, int64_t i, int64_t first_key);

/// What was subtracted from the value of a key, and of all others of its tile: zeros where V has no
/// codes that are folded into P.
std::vector<float> value_centre(const RecipeHead& head, const RecipeInputs& in, int64_t key);

std::vector<float> as_floats(const std::vector<int8_t>& codes);

}  // namespace sagebwd::ref
