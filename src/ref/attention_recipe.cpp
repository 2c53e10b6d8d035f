// SPDX-License-Identifier: Apache-2.0
// Tiles go query block by query block, key tiles in the order of KeyWalk inside. Forward: online
// softmax with the row's largest logit of the tile as the scale of P. Backward: P rebuilt from LSE,
// then dV, dQ and dK tile by tile.
#include "ref/attention_recipe.h"

#include <algorithm>
#include <cmath>
#include <limits>

#include "base/math.h"
#include "numerics/quantize.h"
#include "numerics/rotate.h"
#include "ref/recipe_inputs.h"
#include "ref/recipe_tile.h"
#include "spec/problem.h"

namespace sagebwd::ref {
namespace {

using numerics::DitherOperand;

constexpr float kInf = std::numeric_limits<float>::infinity();

size_t size(int64_t n) { return static_cast<size_t>(n); }

double dot(const float* a, const float* b, int64_t n) {
  double sum = 0;
  for (int64_t c = 0; c < n; ++c) sum += static_cast<double>(a[c]) * b[c];
  return sum;
}

float p_levels(const RecipeHead& head) {
  return static_cast<float>(head.levels_of_p != 0 ? head.levels_of_p
                                                  : spec::p_levels(head.recipe.scheme, 255));
}

bool lifted(const RecipeHead& head, Matmul m) { return (head.recipe.high_precision & m) != 0; }

const int16_t* codes_or_null(const TileCodes& t) {
  return t.codes.empty() ? nullptr : t.codes.data();
}
const float* scale_or_null(const TileCodes& t) {
  return t.codes.empty() ? nullptr : t.scale.data();
}

/// What the logits of a row lack.
double added_mean_logit(const RecipeHead& head, const RecipeInputs& in, int64_t i) {
  return head.softcap == 0.0f ? static_cast<double>(in.mean_logit[i]) : 0.0;
}

/// One query block on its way through the key tiles.
struct ForwardBlock {
  ForwardBlock(int64_t rows, int64_t dv)
      : top(size(rows), -kInf),
        sum(size(rows), 0.0f),
        acc(size(rows * dv), 0.0f),
        max_logit(size(rows), -kInf),
        seen(size(rows), false),
        nan_logit(size(rows), false),
        nan_value(size(rows), false) {}
  // [rows]: the largest exponent so far (a logit plus the logarithm of a folded scale), and the sum
  // of exp2(logit - top).
  std::vector<float> top, sum;
  std::vector<float> acc;        // [rows, dv]
  std::vector<float> max_logit;  // [rows]
  std::vector<bool> seen, nan_logit, nan_value;
};

/// A tile kept until its query block is done, when LSE is known and the tap can be told.
struct KeptTile {
  Tile tile;
  std::vector<float> s2, weight, tile_top;  // weight: 2^(s2 - tile_top), times V's scale if folded
  std::vector<int16_t> p8;
  std::vector<float> v_scale;  // [cols] folded into the weights; ones if none
};

/// What the weights of a tile are multiplied with, [cols].
std::vector<float> folded_scales(const RecipeHead& head, const RecipeInputs& in, const Tile& t) {
  if (!spec::folds_v(head.recipe)) return std::vector<float>(size(t.cols), 1.0f);
  return {in.v_scale.begin() + t.k0, in.v_scale.begin() + t.k0 + t.cols};
}

/// leading: P is not quantised.
KeptTile forward_tile(const RecipeHead& head, const RecipeOperands& x, Tile tile, bool leading,
                      const std::vector<float>& bias, ForwardBlock& block) {
  const int64_t dv = head.value_dim();
  const Tile& t = tile;
  std::vector<float> s2 = tile_logits(head, x, t, bias, lifted(head, kMatmulS));
  cap_logits(head, x.inputs, t, s2);
  const auto is_nan = [](float scale) { return std::isnan(scale); };
  const auto first_scale = x.inputs.v_scale.begin() + t.k0;
  const bool has_poison = std::any_of(first_scale, first_scale + t.cols, is_nan);
  // A tile with NaN or Inf in V has no codes that could carry them, and its P·V runs in floating
  // point. Where scales are folded, a poisoned value has codes 0 instead, and the rows that see it
  // become NaN at the end, so that no other row learns of it.
  const bool folds = spec::folds_v(head.recipe), poisoned = has_poison && !folds;
  std::vector<float> v_scale = folded_scales(head, x.inputs, t);
  if (folds)
    t.for_visible([&](int64_t i, int64_t j, int64_t) {
      if (std::isnan(v_scale[j])) block.nan_value[i] = true;
    });
  for (float& scale : v_scale)
    if (std::isnan(scale)) scale = 1.0f;

  std::vector<float> weight(t.size(), 0.0f), tile_top(size(t.rows), -kInf);
  t.for_visible([&](int64_t i, int64_t j, int64_t at) {
    if (std::isnan(s2[at])) block.nan_logit[i] = true;  // the maximum drops it; P does not
    block.max_logit[i] = std::max(block.max_logit[i], s2[at]);
    weight[at] = s2[at] + std::log2(v_scale[j]);
    tile_top[i] = std::max(tile_top[i], weight[at]);
  });
  t.for_visible(
      [&](int64_t i, int64_t, int64_t at) { weight[at] = std::exp2(weight[at] - tile_top[i]); });

  const bool has_codes = !lifted(head, kMatmulO) && !poisoned;
  const float* values = has_codes ? x.v8.data() : head.v;
  std::vector<float> part(size(t.rows * dv), 0.0f);
  std::vector<int16_t> p8;
  const float levels = p_levels(head);
  // What a block's scale of V, or the levels of P, still have to multiply.
  float unit = has_codes && !folds ? x.inputs.v_scale[t.k0] : 1.0f;
  if (leading || !has_codes) {
    for (int64_t i = 0; i < t.rows; ++i) {
      const auto [begin, end] = t.seen[i];  // masked values stay out, whatever they hold
      matmul_add(1, dv, end - begin, weight.data() + i * t.cols + begin, 0, 1,
                 values + (t.k0 + begin) * dv, dv, &part[i * dv], dv);
    }
  } else {
    const Rounder round(head, t, kMatmulO, DitherOperand::p_forward, levels);
    p8.assign(t.size(), 0);
    t.for_visible(
        [&](int64_t i, int64_t j, int64_t at) { p8[at] = round(weight[at], levels, i, j); });
    matmul_add(t.rows, dv, t.cols, p8.data(), t.cols, 1, values + t.k0 * dv, dv, part.data(), dv);
    unit /= levels;
  }

  const std::vector<float> centre = value_centre(head, x.inputs, t.k0);
  for (int64_t i = 0; i < t.rows; ++i) {
    if (t.seen[i].empty()) continue;
    float tile_sum = 0.0f;
    for (int64_t j = t.seen[i].begin; j < t.seen[i].end; ++j)
      tile_sum += weight[i * t.cols + j] / v_scale[j];
    const float top = std::max(block.top[i], tile_top[i]);
    const float alpha = block.seen[i] ? std::exp2(block.top[i] - top) : 0.0f;
    const float beta = std::exp2(tile_top[i] - top);
    block.sum[i] = block.sum[i] * alpha + tile_sum * beta;
    for (int64_t c = 0; c < dv; ++c)
      block.acc[i * dv + c] = block.acc[i * dv + c] * alpha + part[i * dv + c] * (beta * unit) +
                              centre[c] * (beta * tile_sum);
    block.top[i] = top;
    block.seen[i] = true;
  }
  return {std::move(tile),     std::move(s2), std::move(weight),
          std::move(tile_top), std::move(p8), std::move(v_scale)};
}

void show_forward_tile(const RecipeHead& head, const KeptTile& kept, const ForwardBlock& block,
                       const RecipeTap& tap) {
  const Tile& t = kept.tile;
  std::vector<float> p(kept.weight), p_scale(size(t.rows), 0.0f);
  for (int64_t i = 0; i < t.rows; ++i) {
    if (t.seen[i].empty()) continue;
    const float norm = std::exp2(kept.tile_top[i] - block.top[i]) / block.sum[i];
    p_scale[i] = norm / p_levels(head);
    for (int64_t j = t.seen[i].begin; j < t.seen[i].end; ++j)
      p[i * t.cols + j] *= norm / kept.v_scale[j];
  }
  RecipeTile view{};
  view.q0 = t.q0, view.k0 = t.k0, view.rows = t.rows, view.cols = t.cols;
  view.s2 = kept.s2.data(), view.p = p.data(), view.v_scale = kept.v_scale.data();
  if (!kept.p8.empty()) view.p8 = kept.p8.data(), view.p_scale = p_scale.data();
  tap(view);
}

void finish_forward_block(const RecipeHead& head, const RecipeInputs& in, int64_t q0,
                          const ForwardBlock& block, RecipeForward& out) {
  const int64_t dv = head.value_dim();
  for (int64_t r = 0; r < static_cast<int64_t>(block.top.size()); ++r) {
    if (!block.seen[r]) continue;
    const int64_t i = q0 + r;
    for (int64_t c = 0; c < dv; ++c)
      out.o[i * dv + c] = block.nan_value[r] ? std::numeric_limits<float>::quiet_NaN()
                                             : block.acc[r * dv + c] / block.sum[r];
    const double mean = added_mean_logit(head, in, i);
    out.lse[i] = static_cast<float>(
        numerics::kLn2 * (block.top[r] + std::log2(static_cast<double>(block.sum[r]))) + mean);
    const float logit = block.nan_logit[r]
                            ? std::numeric_limits<float>::quiet_NaN()
                            : static_cast<float>(numerics::kLn2 * block.max_logit[r] + mean);
    if (std::isnan(logit) || out.max_logit < logit) out.max_logit = logit;
  }
}

/// What the backward carries from tile to tile.
struct BackwardState {
  TokenCodes dout;              // codes and scales of dO
  std::vector<float> dout8;     // the codes as floats
  std::vector<float> log2_lse;  // [nq], of logits as tiles have them
  std::vector<bool> active;     // [nq]; false: LSE is -inf, the row has P = 0
  std::vector<double> row_sum;  // [nq], Σ_j dS, or of what the cap takes (Problem)
};

BackwardState start_backward(const RecipeHead& head, const RecipeBackwardIn& in,
                             const RecipeInputs& inputs, RecipeBackward& out) {
  BackwardState s;
  const int64_t dv = head.value_dim();
  const bool per_token = head.recipe.scheme != Scheme::paper;
  s.dout = quantize_tokens(in.dout, head.nq, dv, per_token ? 1 : head.recipe.tile_q);
  s.dout8 = as_floats(s.dout.codes);
  s.row_sum.assign(size(head.nq), 0.0);
  for (int64_t i = 0; i < head.nq; ++i) {
    const bool active = in.lse[i] != -kInf;
    const double log2e = 1.0 / numerics::kLn2, lse = in.lse[i];
    const double delta = dot(in.dout + i * dv, in.o + i * dv, dv) - (in.dlse ? in.dlse[i] : 0.0f);
    s.active.push_back(active);
    s.log2_lse.push_back(
        active ? static_cast<float>((lse - added_mean_logit(head, inputs, i)) * log2e) : 0.0f);
    out.delta.push_back(active ? static_cast<float>(delta) : 0.0f);
  }
  return s;
}

/// to[line, :] += scale[line] · part[line, :]
void add_scaled(const std::vector<float>& part, const std::vector<float>& scale, int64_t d,
                float* to) {
  for (int64_t n = 0; n < static_cast<int64_t>(scale.size()); ++n)
    for (int64_t c = 0; c < d; ++c) to[n * d + c] += scale[n] * part[n * d + c];
}

/// to[j, :] += Σ_i w[i, j]·x[i, :] over visible entries, in floating point: a lifted dV or dK.
void add_by_key(const Tile& t, const std::vector<float>& w, const float* x, int64_t d, float* to) {
  for (int64_t i = 0; i < t.rows; ++i) {
    const auto [begin, end] = t.seen[i];
    matmul_add(end - begin, d, 1, w.data() + i * t.cols + begin, 1, 0, x + (t.q0 + i) * d, d,
               to + (t.k0 + begin) * d, d);
  }
}

/// The same in INT8: values already carry the token scale of x8. Returns the codes for the tap.
TileCodes add_by_key_int8(const RecipeHead& head, const Tile& t, const std::vector<float>& values,
                          const std::vector<float>& x8, int64_t d, Matmul matmul,
                          DitherOperand operand, float levels, float* to) {
  TileCodes codes = quantize_tile(head, t, values, Axis::key, matmul, operand, levels);
  std::vector<float> part(size(t.cols * d), 0.0f);
  matmul_add(t.cols, d, t.rows, codes.codes.data(), 1, t.cols, &x8[t.q0 * d], d, part.data(), d);
  add_scaled(part, codes.scale, d, to + t.k0 * d);
  return codes;
}

void backward_tile(const RecipeHead& head, const RecipeOperands& x, const RecipeBackwardIn& in,
                   const Tile& t, const std::vector<float>& bias, BackwardState& s,
                   RecipeBackward& out, const RecipeTap& tap) {
  const int64_t d = head.d, dv = head.value_dim();
  const RecipeInputs& inputs = x.inputs;
  std::vector<float> s2 = tile_logits(head, x, t, bias, lifted(head, kMatmulSRecompute));
  const std::vector<float> slope = cap_logits(head, inputs, t, s2);
  std::vector<float> p(t.size(), 0.0f), dp(t.size(), 0.0f), ds(t.size(), 0.0f);
  std::vector<float> p_fold(t.size(), 0.0f), ds_fold_q(t.size(), 0.0f), ds_fold_k(t.size(), 0.0f);
  matmul_add(t.rows, t.cols, dv, in.dout + t.q0 * dv, dv, 1, &x.v_t[t.k0], head.nk, dp.data(),
             t.cols);
  const std::vector<float> centre = value_centre(head, inputs, t.k0);
  std::vector<float> centre_dp;  // dO·centre
  for (int64_t i = t.q0; i < t.q0 + t.rows; ++i)
    centre_dp.push_back(static_cast<float>(dot(in.dout + i * dv, centre.data(), dv)));
  t.for_visible([&](int64_t r, int64_t c, int64_t at) {
    const int64_t i = t.q0 + r, j = t.k0 + c;
    p[at] = std::exp2(s2[at] - s.log2_lse[i]);
    if (spec::folds_v(head.recipe)) dp[at] = dp[at] * inputs.v_scale[j] + centre_dp[r];
    const float before_cap = p[at] * (dp[at] - out.delta[i]);
    ds[at] = before_cap * slope[at];
    // A scale along the contraction index cannot leave the integer sum; it goes into the other
    // operand.
    p_fold[at] = p[at] * s.dout.scale[i];
    ds_fold_q[at] = ds[at] * inputs.q_scale[i];
    ds_fold_k[at] = ds[at] * x.dq_fold[j];
    s.row_sum[i] += in.partial_kv || head.softcap == 0.0f ? ds[at] : before_cap - ds[at];
  });

  TileCodes p_codes, key_codes, query_codes;
  if (lifted(head, kMatmulDV))
    add_by_key(t, p, in.dout, dv, out.dv.data());
  else
    p_codes = add_by_key_int8(head, t, p_fold, s.dout8, dv, kMatmulDV, DitherOperand::p_backward,
                              p_levels(head), out.dv.data());

  if (lifted(head, kMatmulDK)) {
    add_by_key(t, ds, head.q, d, out.dk.data());
  } else {
    key_codes = add_by_key_int8(head, t, ds_fold_q, x.q8, d, kMatmulDK, DitherOperand::ds_key,
                                numerics::kLevels, out.dk.data());
    if (head.recipe.smooth_q)  // the codes are of Q - mu_q
      for (int64_t r = 0; r < t.rows; ++r) {
        const auto [begin, end] = t.seen[r];
        matmul_add(end - begin, d, 1, ds.data() + r * t.cols + begin, 1, 0, &x.mu_q[t.q_index * d],
                   d, out.dk.data() + (t.k0 + begin) * d, d);
      }
  }

  if (lifted(head, kMatmulDQ)) {
    for (int64_t r = 0; r < t.rows; ++r) {
      const auto [begin, end] = t.seen[r];
      matmul_add(1, d, end - begin, ds.data() + r * t.cols + begin, 0, 1,
                 x.k_smooth.data() + (t.k0 + begin) * d, d, &out.dq[(t.q0 + r) * d], d);
    }
  } else {
    query_codes = quantize_tile(head, t, ds_fold_k, Axis::query, kMatmulDQ, DitherOperand::ds_query,
                                numerics::kLevels);
    std::vector<float> part(size(t.rows * d), 0.0f);
    matmul_add(t.rows, d, t.cols, query_codes.codes.data(), t.cols, 1, &x.dq_keys[t.k0 * d], d,
               part.data(), d);
    add_scaled(part, query_codes.scale, d, &out.dq[t.q0 * d]);
  }

  if (!tap) return;
  RecipeTile view{};
  view.backward = true;
  view.q0 = t.q0, view.k0 = t.k0, view.rows = t.rows, view.cols = t.cols;
  view.s2 = s2.data(), view.p = p.data(), view.dp = dp.data(), view.ds = ds.data();
  view.p8 = codes_or_null(p_codes), view.p_scale = scale_or_null(p_codes);
  view.ds8_key = codes_or_null(key_codes), view.ds_scale_key = scale_or_null(key_codes);
  view.ds8_query = codes_or_null(query_codes), view.ds_scale_query = scale_or_null(query_codes);
  view.do_scale = &s.dout.scale[t.q0], view.q_scale = &inputs.q_scale[t.q0],
  view.k_fold = &x.dq_fold[t.k0];
  tap(view);
}

}  // namespace

RecipeForward recipe_forward(const RecipeHead& head, const RecipeTap& tap) {
  RecipeOperands x = make_operands(head);
  RecipeForward out;
  out.o.assign(size(head.nq * head.value_dim()), 0.0f);
  out.lse.assign(size(head.nq), -kInf);
  out.max_logit = -kInf;
  const int64_t q_tiles = ceil_div(head.nq, head.recipe.tile_q);
  for (int64_t qt = 0; qt < q_tiles; ++qt) {
    const int64_t q0 = qt * head.recipe.tile_q;
    ForwardBlock block(std::min<int64_t>(head.recipe.tile_q, head.nq - q0), head.value_dim());
    const std::vector<float> bias = logit_bias(head, x, qt, lifted(head, kMatmulS));
    std::vector<KeptTile> kept;
    const KeyWalk walk(head, qt);
    for (int64_t step = 0; step < static_cast<int64_t>(walk.tiles.size()); ++step) {
      KeptTile done = forward_tile(head, x, make_tile(head, qt, walk.tiles[step]),
                                   step < walk.leading, bias, block);
      if (tap) kept.push_back(std::move(done));
    }
    finish_forward_block(head, x.inputs, q0, block, out);
    for (const KeptTile& t : kept) show_forward_tile(head, t, block, tap);
  }
  out.inputs = std::move(x.inputs);
  return out;
}

RecipeBackward recipe_backward(const RecipeHead& head, const RecipeBackwardIn& in,
                               const RecipeTap& tap) {
  const int64_t d = head.d;
  RecipeOperands x = make_operands(head);
  RecipeBackward out;
  out.dq.assign(size(head.nq * d), 0.0f);
  out.dk.assign(size(head.nk * d), 0.0f);
  out.dv.assign(size(head.nk * head.value_dim()), 0.0f);
  BackwardState s = start_backward(head, in, x.inputs, out);

  const int64_t q_tiles = ceil_div(head.nq, head.recipe.tile_q);
  for (int64_t qt = 0; qt < q_tiles; ++qt) {
    const std::vector<float> bias = logit_bias(head, x, qt, lifted(head, kMatmulSRecompute));
    for (int64_t kt : KeyWalk(head, qt).tiles) {
      Tile tile = make_tile(head, qt, kt);
      for (int64_t r = 0; r < tile.rows; ++r)
        if (!s.active[tile.q0 + r]) tile.seen[r] = {0, 0};
      if (!tile.empty()) backward_tile(head, x, in, tile, bias, s, out, tap);
    }
  }

  const auto turn_back = [&](std::vector<float>& rows, Matmul matmul) {
    if (!head.recipe.rotate || lifted(head, matmul)) return;
    for (size_t at = 0; at < rows.size(); at += size(d))
      numerics::rotate_back(&rows[at], static_cast<int>(d));
  };
  turn_back(out.dq, kMatmulDQ), turn_back(out.dk, kMatmulDK);

  // dS·K = dS·(K - mu) + rowsum(dS)·mu. The row sum is zero for whole rows, exactly dLSE when that
  // is given, and known only as the sum itself when the call sees part of the keys. A cap
  // takes something from each dS, which is known as a sum too.
  const std::vector<float>& mean = lifted(head, kMatmulDQ) ? x.inputs.mu_k : x.dq_mean;
  for (int64_t i = 0; i < head.nq; ++i) {
    float row_sum = 0.0f;
    if (in.partial_kv)
      row_sum = static_cast<float>(s.row_sum[i]);
    else if (in.dlse != nullptr && s.active[i])
      row_sum = in.dlse[i];
    if (!in.partial_kv && head.softcap != 0.0f) row_sum -= static_cast<float>(s.row_sum[i]);
    for (int64_t c = 0; c < d; ++c)
      out.dq[i * d + c] = head.scale * (out.dq[i * d + c] + row_sum * mean[c]);
  }
  for (float& g : out.dk) g *= head.scale;

  out.do8 = std::move(s.dout.codes), out.do_scale = std::move(s.dout.scale);
  out.inputs = std::move(x.inputs);
  return out;
}

}  // namespace sagebwd::ref
