// SPDX-License-Identifier: Apache-2.0
#include "ref/recipe_tile.h"

#include <algorithm>
#include <cmath>
#include <limits>

#include "base/math.h"

namespace sagebwd::ref {

namespace {

constexpr float kInf = std::numeric_limits<float>::infinity();

size_t size(int64_t n) { return static_cast<size_t>(n); }

}  // namespace

bool Tile::empty() const {
  return std::all_of(seen.begin(), seen.end(), [](const Span& s) { return s.empty(); });
}

KeyWalk::KeyWalk(const RecipeHead& head, int64_t q_index) {
  const int64_t k_tiles = ceil_div(head.nk, head.recipe.tile_k);
  const auto add = [&](int64_t tile, bool leads) {
    if (tile >= k_tiles || make_tile(head, q_index, tile).empty()) return;
    tiles.push_back(tile);
    leading += leads;
  };
  const std::optional<BlockRows>& lists = head.visible.lists();
  if (!lists) {
    for (int64_t tile = 0; tile < k_tiles; ++tile) add(tile, false);
    return;
  }
  const std::vector<int64_t>& list =
      lists->rows[size(q_index * head.recipe.tile_q / lists->block_q)];
  const int64_t tiles_per_block = lists->block_k / head.recipe.tile_k;
  for (size_t entry = 0; entry < list.size(); ++entry)
    for (int64_t n = 0; n < tiles_per_block; ++n)
      add(list[entry] * tiles_per_block + n,
          head.lead < 0 || static_cast<int64_t>(entry) < head.lead);
}

Tile make_tile(const RecipeHead& head, int64_t q_index, int64_t k_index) {
  Tile t;
  t.q_index = q_index, t.k_index = k_index;
  t.q0 = q_index * head.recipe.tile_q, t.k0 = k_index * head.recipe.tile_k;
  t.rows = std::min<int64_t>(head.recipe.tile_q, head.nq - t.q0);
  t.cols = std::min<int64_t>(head.recipe.tile_k, head.nk - t.k0);
  for (int64_t i = 0; i < t.rows; ++i) {
    const Span keys = head.visible.inside(t.q0 + i, t.k0, t.k0 + t.cols);
    t.seen.push_back({keys.begin - t.k0, keys.end - t.k0});
  }
  return t;
}

std::vector<float> logit_bias(const RecipeHead& head, const RecipeOperands& x, int64_t q_index,
                              bool lifted) {
  if (!head.recipe.smooth_q || lifted) return {};
  const float* mu = &x.inputs.mu_q[size(q_index * head.d)];
  const double factor = head.scale * numerics::kLog2e;
  std::vector<float> bias(size(head.nk));
  for (int64_t j = 0; j < head.nk; ++j) {
    double dot = 0;
    for (int64_t c = 0; c < head.d; ++c)
      dot += static_cast<double>(mu[c]) * x.k_smooth[j * head.d + c];
    bias[j] = static_cast<float>(factor * dot);
  }
  return bias;
}

std::vector<float> tile_logits(const RecipeHead& head, const RecipeOperands& x, const Tile& t,
                               const std::vector<float>& bias, bool lifted) {
  const float factor = head.scale * numerics::kLog2e;
  const int64_t d = head.d;
  std::vector<float> dot(t.size(), 0.0f), s2(t.size(), -kInf);
  if (lifted) {
    matmul_add(t.rows, t.cols, d, head.q + t.q0 * d, d, 1, &x.k_smooth_t[t.k0], head.nk, dot.data(),
               t.cols);
    // Inf counts as NaN: a logit of -Inf would hide it.
    t.for_visible([&](int64_t i, int64_t j, int64_t at) {
      const float scales = x.inputs.q_scale[t.q0 + i] + x.inputs.k_scale[t.k0 + j];
      s2[at] = std::isnan(scales) ? scales : factor * dot[at];
    });
    return s2;
  }
  matmul_add(t.rows, t.cols, d, &x.q8[t.q0 * d], d, 1, &x.k8_t[t.k0], head.nk, dot.data(), t.cols);
  std::vector<float> centre;
  for (int64_t i = 0; i < t.rows; ++i)
    centre.push_back(centre_logit(head, x.inputs, t.q0 + i, t.k0));
  t.for_visible([&](int64_t i, int64_t j, int64_t at) {
    const float logit_factor = x.inputs.q_scale[t.q0 + i] * factor;
    s2[at] = dot[at] * x.inputs.k_scale[t.k0 + j] * logit_factor;
    if (!bias.empty()) s2[at] += bias[t.k0 + j];
    s2[at] += centre[i];
  });
  return s2;
}

std::vector<float> cap_logits(const RecipeHead& head, const RecipeInputs& in, const Tile& t,
                              std::vector<float>& s2) {
  std::vector<float> slope(t.size(), 1.0f);
  if (head.softcap == 0.0f) return slope;
  const double cap = static_cast<double>(head.softcap);
  t.for_visible([&](int64_t i, int64_t, int64_t at) {
    const double x =
        numerics::kLn2 * static_cast<double>(s2[at]) + static_cast<double>(in.mean_logit[t.q0 + i]);
    s2[at] = static_cast<float>(cap * std::tanh(x / cap) / numerics::kLn2);
    slope[at] = static_cast<float>(1.0 / (std::cosh(x / cap) * std::cosh(x / cap)));
  });
  return slope;
}

Rounder::Rounder(const RecipeHead& head, const Tile& tile, Matmul matmul,
                 numerics::DitherOperand operand, float levels)
    : levels_(levels) {
  if (!head.recipe.dithers(matmul)) return;
  const float u = numerics::dither_uniform(head.recipe.seed, head.sequence, head.head, tile.q_index,
                                           tile.k_index, operand);
  for (int64_t j = 0; j < tile.cols; ++j)
    key_term_.push_back(numerics::dither_key_term(static_cast<int>(j), u));
}

TileCodes quantize_tile(const RecipeHead& head, const Tile& t, const std::vector<float>& values,
                        Axis axis, Matmul matmul, numerics::DitherOperand operand, float levels) {
  const bool by_query = axis == Axis::query;
  std::vector<float> amax(size(by_query ? t.rows : t.cols), 0.0f);
  t.for_visible([&](int64_t i, int64_t j, int64_t at) {
    float& top = amax[by_query ? i : j];
    const float x = std::fabs(values[at]);
    if (top < x || std::isnan(x)) top = x;  // once NaN, it stays
  });
  if (head.recipe.scheme == Scheme::paper) {
    float tile_amax = 0.0f;
    for (float x : amax)
      if (numerics::is_finite(x)) tile_amax = std::max(tile_amax, x);
    for (float& x : amax)
      if (numerics::is_finite(x)) x = tile_amax;
  }
  TileCodes out{std::vector<int16_t>(t.size(), 0), std::vector<float>(amax.size())};
  std::vector<float> inverse(amax.size());
  for (size_t n = 0; n < amax.size(); ++n) {
    out.scale[n] = numerics::scale_of(amax[n], levels);
    inverse[n] = numerics::inverse_of(out.scale[n]);
  }
  const Rounder round(head, t, matmul, operand, levels);
  t.for_visible([&](int64_t i, int64_t j, int64_t at) {
    out.codes[at] = round(values[at], inverse[by_query ? i : j], i, j);
  });
  return out;
}

}  // namespace sagebwd::ref
