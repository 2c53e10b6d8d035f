// SPDX-License-Identifier: Apache-2.0
// One head of random inputs, in the forms the two oracles take.
#pragma once

#include <cmath>
#include <numbers>
#include <utility>
#include <vector>

#include "base/half.h"
#include "ref/attention_exact.h"
#include "ref/attention_recipe.h"
#include "support/random.h"
#include "trace/metrics.h"

namespace sagebwd::testing {

inline std::vector<float> normal_values(int64_t count, double sigma, uint64_t seed) {
  Random random(seed);
  std::vector<float> x(static_cast<size_t>(count));
  for (float& v : x) {
    const double u = 1.0 - static_cast<double>(random.unit()),
                 w = static_cast<double>(random.unit());
    v = static_cast<float>(sigma * std::sqrt(-2.0 * std::log(u)) *
                           std::cos(2.0 * std::numbers::pi * w));
  }
  return x;
}

inline void round_to_bf16(std::vector<float>& x) {
  for (float& v : x) v = to_float(from_float<bf16>(v));
}

struct RandomHead {
  int64_t nq, nk, d;
  std::vector<float> q, k, v, dout;
  std::vector<float> dlse;  // empty: none
  float scale;
  std::function<std::pair<int64_t, int64_t>(int64_t)> visible;

  RandomHead(int64_t nq_, int64_t nk_, int64_t d_, double sigma = 1.0, uint64_t seed = 1)
      : nq(nq_),
        nk(nk_),
        d(d_),
        scale(static_cast<float>(1.0 / std::sqrt(static_cast<double>(d_)))) {
    q = normal_values(nq * d, sigma, 4 * seed), k = normal_values(nk * d, sigma, 4 * seed + 1);
    v = normal_values(nk * d, 1.0, 4 * seed + 2), dout = normal_values(nq * d, 1.0, 4 * seed + 3);
  }

  RandomHead& causal() {
    visible = [shift = nk - nq](int64_t i) {
      return std::pair<int64_t, int64_t>(0, std::max<int64_t>(i + shift + 1, 0));
    };
    return *this;
  }
  RandomHead& window(int64_t left, int64_t right) {
    visible = [left, right, n = nk](int64_t i) {
      const int64_t end = std::min(i + right + 1, n);
      return std::pair<int64_t, int64_t>(std::min(std::max<int64_t>(i - left, 0), end), end);
    };
    return *this;
  }
  RandomHead& bf16_inputs() {
    for (std::vector<float>* x : {&q, &k, &v, &dout}) round_to_bf16(*x);
    return *this;
  }

  ref::RecipeHead recipe(const Recipe& r) const {
    ref::RecipeHead h;
    h.nq = nq, h.nk = nk, h.d = d, h.q = q.data(), h.k = k.data(), h.v = v.data();
    h.scale = scale, h.visible = visible, h.recipe = r;
    return h;
  }
};

/// The exact answer to a head; keeps the FP64 copies.
struct ExactAnswer {
  std::vector<double> q, k, v, dout, dlse;
  ref::ExactHead head;
  ref::ExactResult result;

  explicit ExactAnswer(const RandomHead& h,
                       const std::function<void(const ref::ExactRow&)>& tap = {})
      : q(h.q.begin(), h.q.end()),
        k(h.k.begin(), h.k.end()),
        v(h.v.begin(), h.v.end()),
        dout(h.dout.begin(), h.dout.end()),
        dlse(h.dlse.begin(), h.dlse.end()) {
    head.nq = h.nq, head.nk = h.nk, head.d = h.d;
    head.q = q.data(), head.k = k.data(), head.v = v.data(), head.dout = dout.data();
    head.dlse = dlse.empty() ? nullptr : dlse.data();
    head.scale = static_cast<double>(h.scale), head.visible = h.visible;
    result = ref::attention_exact(head, tap);
  }
  ExactAnswer(const ExactAnswer&) = delete;
};

/// Forward and backward of the recipe oracle, O handed on unrounded.
struct RecipeAnswer {
  ref::RecipeForward forward;
  ref::RecipeBackward backward;

  RecipeAnswer(const RandomHead& h, const Recipe& recipe) {
    const ref::RecipeHead head = h.recipe(recipe);
    forward = ref::recipe_forward(head);
    backward = ref::recipe_backward(head, {forward.o.data(), forward.lse.data(), h.dout.data(),
                                           h.dlse.empty() ? nullptr : h.dlse.data(), false});
  }
};

inline Recipe paper_recipe() { return Recipe::paper(); }
inline Recipe vectorwise_recipe() {
  Recipe r = Recipe::vectorwise();
  r.tile_q = 64, r.tile_k = 128;
  return r;
}

/// |value - reference| / |reference|
template <typename T, typename S>
double rel_l2(const std::vector<T>& value, const std::vector<S>& reference) {
  trace::ErrorStats stats;
  const std::vector<double> wide(reference.begin(), reference.end());
  stats.add_row(value.data(), wide.data(), static_cast<int64_t>(value.size()), 0);
  stats.finish();
  return stats.rel_l2;
}

}  // namespace sagebwd::testing
