// SPDX-License-Identifier: Apache-2.0
#include "ref/recipe_inputs.h"

#include <algorithm>
#include <cmath>
#include <limits>

#include "base/math.h"
#include "numerics/octaves.h"
#include "numerics/quantize.h"
#include "numerics/rotate.h"
#include "spec/problem.h"

namespace sagebwd::ref {
namespace {

using numerics::code_nearest;
using numerics::inverse_of;
using numerics::scale_of;

size_t size(int64_t n) { return static_cast<size_t>(n); }

/// A token that holds NaN or Inf is left out of means and scales, so that it cannot spoil its
/// neighbours.
std::vector<bool> poisoned_tokens(const float* x, int64_t n, int64_t d) {
  std::vector<bool> poisoned(size(n), false);
  for (int64_t i = 0; i < n; ++i)
    for (int64_t c = 0; c < d; ++c)
      if (!numerics::is_finite(x[i * d + c])) poisoned[i] = true;
  return poisoned;
}

/// Mean over the tokens that are not poisoned; zero if there are none.
std::vector<float> mean_of(const float* x, int64_t n, int64_t d) {
  const std::vector<bool> poisoned = poisoned_tokens(x, n, d);
  std::vector<double> sum(size(d), 0.0);
  int64_t count = 0;
  for (int64_t i = 0; i < n; ++i) {
    if (poisoned[i]) continue;
    ++count;
    for (int64_t c = 0; c < d; ++c) sum[c] += x[i * d + c];
  }
  std::vector<float> mean(size(d), 0.0f);
  if (count > 0)
    for (int64_t c = 0; c < d; ++c)
      mean[c] = static_cast<float>(sum[c] / static_cast<double>(count));
  return mean;
}

void subtract(float* x, int64_t n, const std::vector<float>& mean) {
  const int64_t d = static_cast<int64_t>(mean.size());
  for (int64_t i = 0; i < n; ++i)
    for (int64_t c = 0; c < d; ++c) x[i * d + c] -= mean[c];
}

std::vector<float> transposed(const std::vector<float>& x, int64_t n, int64_t d) {
  std::vector<float> t(x.size());
  for (int64_t i = 0; i < n; ++i)
    for (int64_t c = 0; c < d; ++c) t[c * n + i] = x[i * d + c];
  return t;
}

std::vector<float> rotated(std::vector<float> x, int64_t d) {
  for (size_t at = 0; at < x.size(); at += size(d)) numerics::rotate(&x[at], static_cast<int>(d));
  return x;
}

/// Whether a mean of values becomes a centre. Those that hold NaN or Inf do not count.
bool stands_out(const std::vector<float>& mean, const std::vector<float>& values) {
  const int64_t d = static_cast<int64_t>(mean.size()),
                count = static_cast<int64_t>(values.size()) / d;
  const std::vector<bool> poisoned = poisoned_tokens(values.data(), count, d);
  double of_mean = 0, of_values = 0;
  int64_t counted = 0;
  for (float m : mean) of_mean += static_cast<double>(m) * m;
  for (int64_t i = 0; i < count; ++i) {
    if (poisoned[i]) continue;
    ++counted;
    for (int64_t c = 0; c < d; ++c)
      of_values += static_cast<double>(values[i * d + c]) * values[i * d + c];
  }
  return static_cast<double>(counted) * of_mean >= numerics::kLeastCentreShare * of_values;
}

/// The centres of K or V, x [nk, d], in `vectorwise`; zeros where nothing is smoothed.
TokenCodes make_centres(const RecipeHead& head, const float* x, int64_t d, bool of_values) {
  const int octaves = numerics::octaves_of(head.nk);
  TokenCodes out{std::vector<int8_t>(size(octaves * d), 0), std::vector<float>(size(octaves))};
  if (!head.recipe.smooth_k) return out;
  for (int octave = of_values ? numerics::kFirstValueCentre : 0; octave < octaves; ++octave) {
    const numerics::Sample sample = numerics::centre_sample(octave);
    std::vector<float> rows;
    for (int n = 0; n < sample.count; ++n) {
      const float* token = x + sample.key(n) * d;
      rows.insert(rows.end(), token, token + d);
    }
    std::vector<float> mean = mean_of(rows.data(), static_cast<int64_t>(rows.size()) / d, d);
    if (of_values && !stands_out(mean, rows)) std::fill(mean.begin(), mean.end(), 0.0f);
    if (!of_values && head.recipe.rotate) mean = rotated(std::move(mean), d);
    TokenCodes centre = quantize_tokens(mean.data(), 1, d, 1);
    std::copy(centre.codes.begin(), centre.codes.end(), &out.codes[size(octave * d)]);
    out.scale[octave] = centre.scale[0];
  }
  return out;
}

int octave_of_key(int64_t key) { return numerics::octave_of_block(key / kKeysPerScale); }

float centre_of(const RecipeInputs& in, int64_t key, int64_t c, int64_t d) {
  const int octave = octave_of_key(key);
  return in.centre_scale[octave] * static_cast<float>(in.centre8[size(octave * d + c)]);
}

/// Codes and scales of K in `vectorwise`.
void quantize_lone_keys(const RecipeHead& head, RecipeInputs& in) {
  const int64_t nk = head.nk, d = head.d;
  TokenCodes centres = make_centres(head, head.k, d, false);
  in.centre8 = std::move(centres.codes), in.centre_scale = std::move(centres.scale);
  std::vector<float> x(head.k, head.k + nk * d);
  if (head.recipe.rotate) x = rotated(std::move(x), d);
  const std::vector<bool> poisoned = poisoned_tokens(head.k, nk, d);
  in.k8.assign(size(nk * d), 0), in.k_scale.assign(size(nk), 0.0f);
  for (int64_t j = 0; j < nk; ++j) {
    float amax = 0.0f;
    for (int64_t c = 0; c < d; ++c) {
      x[j * d + c] -= centre_of(in, j, c, d);
      amax = std::max(amax, std::fabs(x[j * d + c]));
    }
    in.k_scale[j] =
        poisoned[j] ? std::numeric_limits<float>::quiet_NaN() : numerics::key_scale_of(amax);
    for (int64_t c = 0; c < d && !poisoned[j]; ++c)
      in.k8[j * d + c] = static_cast<int8_t>(code_nearest(x[j * d + c], inverse_of(in.k_scale[j])));
  }
}

/// The same of V, where its scale is folded into P: that takes the logarithm of the scale, so a
/// token that is zero has a small one.
void quantize_lone_values(const RecipeHead& head, RecipeInputs& in) {
  const int64_t n = head.nk, d = head.value_dim();
  TokenCodes centres = make_centres(head, head.v, d, true);
  in.v_centre8 = std::move(centres.codes), in.v_centre_scale = std::move(centres.scale);
  in.v8.assign(size(n * d), 0), in.v_scale = quantize_tokens(head.v, n, d, 1).scale;
  for (int64_t i = 0; i < n; ++i) {
    if (std::isnan(in.v_scale[i])) continue;
    const std::vector<float> centre = value_centre(head, in, i);
    std::vector<float> x(head.v + i * d, head.v + (i + 1) * d);
    float amax = 0.0f;
    for (int64_t c = 0; c < d; ++c) x[c] -= centre[c], amax = std::max(amax, std::fabs(x[c]));
    in.v_scale[i] = numerics::lone_value_scale(amax);
    for (int64_t c = 0; c < d; ++c)
      in.v8[i * d + c] = static_cast<int8_t>(code_nearest(x[c], inverse_of(in.v_scale[i])));
  }
}

/// The operand of dQ in `vectorwise`, from the codes of K.
void make_dq_operand(const RecipeHead& head, RecipeOperands& x) {
  const int64_t nk = head.nk, d = head.d, tile = head.recipe.tile_k;
  const RecipeInputs& in = x.inputs;
  std::vector<float> keys(size(nk * d), 0.0f);
  for (int64_t j = 0; j < nk; ++j)
    for (int64_t c = 0; c < d && !std::isnan(in.k_scale[j]); ++c)
      keys[j * d + c] =
          in.k_scale[j] * static_cast<float>(in.k8[size(j * d + c)]) + centre_of(in, j, c, d);
  std::vector<float> sampled;
  const numerics::Sample sample = numerics::spread_sample(nk);
  for (int n = 0; n < sample.count; ++n) {
    const int64_t j = sample.key(n);
    if (!std::isnan(in.k_scale[j])) sampled.insert(sampled.end(), &keys[j * d], &keys[j * d] + d);
  }
  x.dq_mean = mean_of(sampled.data(), static_cast<int64_t>(sampled.size()) / d, d);
  subtract(keys.data(), nk, x.dq_mean);
  for (int64_t j = 0; j < nk; ++j)
    if (std::isnan(in.k_scale[j])) std::fill_n(&keys[j * d], d, 0.0f);
  TokenCodes codes = quantize_tokens(keys.data(), nk, d, tile);
  x.dq_keys = as_floats(codes.codes), x.dq_fold = std::move(codes.scale);
  if (head.recipe.rotate) numerics::rotate_back(x.dq_mean.data(), static_cast<int>(d));
}

}  // namespace

std::vector<float> value_centre(const RecipeHead& head, const RecipeInputs& in, int64_t key) {
  std::vector<float> centre(size(head.value_dim()), 0.0f);
  if (!spec::folds_v(head.recipe)) return centre;
  const int octave = octave_of_key(key);
  for (size_t c = 0; c < centre.size(); ++c)
    centre[c] = in.v_centre_scale[octave] *
                static_cast<float>(in.v_centre8[static_cast<size_t>(octave) * centre.size() + c]);
  return centre;
}

std::vector<float> as_floats(const std::vector<int8_t>& codes) {
  return std::vector<float>(codes.begin(), codes.end());
}

TokenCodes quantize_tokens(const float* x, int64_t n, int64_t d, int64_t tokens_per_scale) {
  const std::vector<bool> poisoned = poisoned_tokens(x, n, d);
  TokenCodes out{std::vector<int8_t>(size(n * d), 0), std::vector<float>(size(n))};
  for (int64_t begin = 0; begin < n; begin += tokens_per_scale) {
    const int64_t end = std::min(begin + tokens_per_scale, n);
    float amax = 0.0f;
    for (int64_t i = begin; i < end; ++i)
      for (int64_t c = 0; c < d && !poisoned[i]; ++c)
        amax = std::max(amax, std::fabs(x[i * d + c]));
    const float scale = scale_of(amax), inverse = inverse_of(scale);
    for (int64_t i = begin; i < end; ++i) {
      out.scale[i] = poisoned[i] ? std::numeric_limits<float>::quiet_NaN() : scale;
      for (int64_t c = 0; c < d && !poisoned[i]; ++c)
        out.codes[i * d + c] = static_cast<int8_t>(code_nearest(x[i * d + c], inverse));
    }
  }
  return out;
}

namespace {

/// Quantises the inputs, and keeps what matmuls out of INT8 take.
void quantize_inputs(const RecipeHead& head, RecipeOperands& x) {
  const int64_t nq = head.nq, nk = head.nk, d = head.d, dv = head.value_dim();
  const Recipe& recipe = head.recipe;
  const bool paper = recipe.scheme == Scheme::paper;
  const auto turned = [&](const std::vector<float>& rows) {
    return recipe.rotate ? rotated(rows, d) : rows;
  };
  RecipeInputs& in = x.inputs;

  x.k_smooth.assign(head.k, head.k + nk * d);
  in.mu_k = paper && recipe.smooth_k ? mean_of(head.k, nk, d) : std::vector<float>(size(d), 0.0f);
  if (paper) {
    subtract(x.k_smooth.data(), nk, in.mu_k);
    TokenCodes k = quantize_tokens(turned(x.k_smooth).data(), nk, d, recipe.tile_k);
    in.k8 = std::move(k.codes), in.k_scale = std::move(k.scale);
  } else {
    quantize_lone_keys(head, in);
  }

  const int64_t q_tiles = ceil_div(nq, recipe.tile_q);
  std::vector<float> q_smooth(head.q, head.q + nq * d);
  in.mu_q.assign(size(q_tiles * d), 0.0f);
  for (int64_t t = 0; t < q_tiles && recipe.smooth_q; ++t) {
    const int64_t q0 = t * recipe.tile_q, rows = std::min<int64_t>(recipe.tile_q, nq - q0);
    const std::vector<float> mean = mean_of(head.q + q0 * d, rows, d);
    subtract(q_smooth.data() + q0 * d, rows, mean);
    std::copy(mean.begin(), mean.end(), in.mu_q.begin() + t * d);
  }
  x.mu_q = turned(in.mu_q);
  TokenCodes q = quantize_tokens(turned(q_smooth).data(), nq, d, paper ? recipe.tile_q : 1);
  in.q8 = std::move(q.codes), in.q_scale = std::move(q.scale);

  if (paper) {
    TokenCodes v = quantize_tokens(head.v, nk, dv, recipe.tile_k);
    in.v8 = std::move(v.codes), in.v_scale = std::move(v.scale);
  } else {
    quantize_lone_values(head, in);
  }

  for (int64_t i = 0; i < nq; ++i) {
    double dot = 0;
    for (int64_t c = 0; c < d; ++c) dot += static_cast<double>(head.q[i * d + c]) * in.mu_k[c];
    in.mean_logit.push_back(static_cast<float>(static_cast<double>(head.scale) * dot));
  }
  x.k_smooth_t = transposed(x.k_smooth, nk, d);
  if (!spec::folds_v(recipe))
    x.v_t = transposed(std::vector<float>(head.v, head.v + nk * dv), nk, dv);
}

}  // namespace

RecipeOperands make_operands(const RecipeHead& head) {
  RecipeOperands x;
  RecipeInputs& in = x.inputs;
  if (head.codes != nullptr)
    in = *head.codes;
  else
    quantize_inputs(head, x);
  x.q8 = as_floats(in.q8), x.k8 = as_floats(in.k8), x.v8 = as_floats(in.v8);
  x.k8_t = transposed(x.k8, head.nk, head.d);
  if (head.recipe.scheme == Scheme::paper)
    x.dq_keys = x.k8, x.dq_fold = in.k_scale, x.dq_mean = in.mu_k;
  else
    make_dq_operand(head, x);
  if (spec::folds_v(head.recipe)) x.v_t = transposed(x.v8, head.nk, head.value_dim());
  return x;
}

float centre_logit(const RecipeHead& head, const RecipeInputs& in, int64_t i, int64_t first_key) {
  if (head.recipe.scheme == Scheme::paper) return 0.0f;
  const int64_t d = head.d;
  const int octave = octave_of_key(first_key);
  int32_t dot = 0;
  for (int64_t c = 0; c < d; ++c)
    dot += static_cast<int32_t>(in.q8[size(i * d + c)]) * in.centre8[size(octave * d + c)];
  const float factor = in.q_scale[i] * (head.scale * numerics::kLog2e);
  return static_cast<float>(dot) * in.centre_scale[octave] * factor;
}

}  // namespace sagebwd::ref
