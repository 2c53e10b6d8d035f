// SPDX-License-Identifier: Apache-2.0
// Properties of the recipe as a whole: offsets that cancel, gradients of LSE, partial keys, dither,
// poison.
#include <gtest/gtest.h>

#include <algorithm>
#include <limits>
#include <string>

#include "ref/random_head.h"

namespace sagebwd {
namespace {

using testing::ExactAnswer;
using testing::paper_recipe;
using testing::RandomHead;
using testing::RecipeAnswer;
using testing::rel_l2;
using testing::vectorwise_recipe;

constexpr float kInf = std::numeric_limits<float>::infinity();
constexpr float kNan = std::numeric_limits<float>::quiet_NaN();

void add_offset(std::vector<float>& x, float offset) {
  for (float& y : x) y += offset;
}

TEST(RecipeProperty, OffsetOfKCostsNothing) {
  const RandomHead plain(256, 256, 64);
  RandomHead shifted = plain;
  add_offset(shifted.k, 10.0f);
  const ExactAnswer exact(shifted), before(plain);
  for (const Recipe& recipe : {paper_recipe(), vectorwise_recipe()}) {
    const RecipeAnswer a(plain, recipe), b(shifted, recipe);
    const auto costs_nothing = [](const auto& got, const auto& want, const auto& plain_got,
                                  const auto& plain_want) {
      EXPECT_LT(rel_l2(got, want), 1.1 * rel_l2(plain_got, plain_want));
    };
    costs_nothing(b.forward.o, exact.result.o, a.forward.o, before.result.o);
    costs_nothing(b.backward.dq, exact.result.dq, a.backward.dq, before.result.dq);
    costs_nothing(b.backward.dk, exact.result.dk, a.backward.dk, before.result.dk);
    costs_nothing(b.backward.dv, exact.result.dv, a.backward.dv, before.result.dv);
    // k + 10 - mean differs from k - mean by the rounding of k + 10, so few codes move. Centres of
    // `vectorwise` have codes of their own, and their logits the error of the codes of Q.
    const bool paper = recipe.scheme == Scheme::paper;
    if (paper) {
      EXPECT_LT(rel_l2(b.forward.o, a.forward.o), 2e-3);
      EXPECT_LT(rel_l2(b.backward.dq, a.backward.dq), 2e-3);
    }
    // LSE and the largest logit are of the true logits, which are up to 28 here.
    for (int64_t i = 0; i < 256; ++i)
      ASSERT_NEAR(static_cast<double>(b.forward.lse[i]), exact.result.lse[i], paper ? 0.01 : 0.3)
          << i;
    EXPECT_NEAR(static_cast<double>(b.forward.max_logit), exact.result.max_logit, 0.3);

    Recipe rough = recipe;
    rough.smooth_k = false;
    const RecipeAnswer c(shifted, rough);
    EXPECT_GT(rel_l2(c.backward.dq, exact.result.dq), paper ? 0.1 : 0.05)
        << "without smoothing the offset eats the codes";
  }
}

TEST(RecipeProperty, OffsetOfQNeedsSmoothing) {
  RandomHead h(256, 256, 64);
  add_offset(h.q, 10.0f);
  const ExactAnswer exact(h);
  Recipe recipe = paper_recipe();
  const RecipeAnswer rough(h, recipe);
  recipe.smooth_q = true;
  const RecipeAnswer smooth(h, recipe);
  EXPECT_LT(rel_l2(smooth.backward.dq, exact.result.dq),
            0.5 * rel_l2(rough.backward.dq, exact.result.dq));
  // dK holds the mean query times the column sums of dS, which only the unquantised term carries.
  EXPECT_LT(rel_l2(smooth.backward.dk, exact.result.dk), 0.02);
}

/// dLSE adds a rank-one term c·dLSE·mean(K) to dQ that the centred codes cannot show.
TEST(RecipeProperty, LseGradientWithALargeKeyMean) {
  RandomHead h(192, 256, 64);
  add_offset(h.k, 10.0f);
  h.dlse = testing::normal_values(h.nq, 1.0, 21);
  const ExactAnswer exact(h);
  for (const Recipe& recipe : {paper_recipe(), vectorwise_recipe()}) {
    const RecipeAnswer a(h, recipe);
    EXPECT_LT(rel_l2(a.backward.dq, exact.result.dq), 0.01);
    EXPECT_LT(rel_l2(a.backward.dk, exact.result.dk), 0.07);
    if (recipe.scheme == Scheme::vectorwise) continue;  // its mean key is nowhere to be seen
    std::vector<float> without = a.backward.dq;
    for (int64_t i = 0; i < h.nq; ++i)
      for (int64_t c = 0; c < h.d; ++c)
        without[i * h.d + c] -= h.scale * h.dlse[i] * a.backward.inputs.mu_k[c];
    EXPECT_GT(rel_l2(without, exact.result.dq), 0.9);
  }
}

/// Two chunks of keys, merged as a ring does: lse and o of all keys, then one backward per chunk.
TEST(RecipeProperty, TwoChunksOfKeysAddUpToTheWhole) {
  RandomHead h(192, 256, 64);
  add_offset(h.k, 10.0f);
  for (int64_t n = 100 * 64; n < 256 * 64; ++n)
    h.k[n] -= 4.0f;  // the chunks have means of their own
  const ExactAnswer exact(h);
  for (const Recipe& recipe : {paper_recipe(), vectorwise_recipe()}) {
    RandomHead part[2] = {h, h};
    const int64_t cut = 100;
    part[0].nk = cut, part[1].nk = 256 - cut;
    part[1].k.erase(part[1].k.begin(), part[1].k.begin() + cut * 64);
    part[1].v.erase(part[1].v.begin(), part[1].v.begin() + cut * 64);
    ref::RecipeForward f[2] = {ref::recipe_forward(part[0].recipe(recipe)),
                               ref::recipe_forward(part[1].recipe(recipe))};
    std::vector<float> o(h.q.size()), lse(192), dq(h.q.size(), 0.0f), dk, dv, dq_without(dq);
    for (int64_t i = 0; i < 192; ++i) {
      const double a = static_cast<double>(f[0].lse[i]), b = static_cast<double>(f[1].lse[i]);
      const double merged = std::max(a, b) + std::log1p(std::exp(-std::fabs(a - b)));
      lse[i] = static_cast<float>(merged);
      for (int64_t c = 0; c < 64; ++c)
        o[i * 64 + c] =
            static_cast<float>(std::exp(a - merged) * static_cast<double>(f[0].o[i * 64 + c]) +
                               std::exp(b - merged) * static_cast<double>(f[1].o[i * 64 + c]));
    }
    EXPECT_LT(rel_l2(o, exact.result.o), 0.03);
    for (const RandomHead& p : part) {
      ref::RecipeBackwardIn in{o.data(), lse.data(), h.dout.data(), nullptr, true};
      const ref::RecipeBackward g = ref::recipe_backward(p.recipe(recipe), in);
      in.partial_kv = false;
      const ref::RecipeBackward naive = ref::recipe_backward(p.recipe(recipe), in);
      for (size_t n = 0; n < dq.size(); ++n) dq[n] += g.dq[n], dq_without[n] += naive.dq[n];
      dk.insert(dk.end(), g.dk.begin(), g.dk.end());
      dv.insert(dv.end(), g.dv.begin(), g.dv.end());
    }
    // The row sums carry the error of D times a mean of 6 or 10; the whole run does not need them.
    const RecipeAnswer whole(h, recipe);
    EXPECT_LT(rel_l2(dq, exact.result.dq), 1.5 * rel_l2(whole.backward.dq, exact.result.dq));
    EXPECT_LT(rel_l2(dk, exact.result.dk), 1.5 * rel_l2(whole.backward.dk, exact.result.dk));
    EXPECT_LT(rel_l2(dv, exact.result.dv), 1.5 * rel_l2(whole.backward.dv, exact.result.dv));
    EXPECT_GT(rel_l2(dq_without, exact.result.dq), 0.3)
        << "the row sums are real: the flag must matter";
  }
}

TEST(RecipeProperty, DitherIsReplayableAndKeyed) {
  const RandomHead h(128, 128, 32);
  Recipe r = vectorwise_recipe();
  r.rounding = Rounding::dither, r.seed = 5;
  const auto run = [&](int64_t sequence, int64_t head_index) {
    ref::RecipeHead head = h.recipe(r);
    head.sequence = sequence, head.head = head_index;
    const ref::RecipeForward f = ref::recipe_forward(head);
    const ref::RecipeBackward b =
        ref::recipe_backward(head, {f.o.data(), f.lse.data(), h.dout.data(), nullptr, false});
    std::vector<float> all = f.o;
    for (const std::vector<float>* x : {&b.dq, &b.dk, &b.dv})
      all.insert(all.end(), x->begin(), x->end());
    return all;
  };
  const std::vector<float> first = run(0, 0);
  EXPECT_EQ(run(0, 0), first);
  EXPECT_NE(run(1, 0), first);
  EXPECT_NE(run(0, 1), first);
  r.seed = 6;
  EXPECT_NE(run(0, 0), first);
}

/// dQ and dK quantise the same dS; with offsets of their own their errors do not add up.
TEST(RecipeProperty, EveryOperandHasItsOwnDither) {
  const RandomHead h(128, 64, 32);
  Recipe r = paper_recipe();  // one scale per tile: only the offsets can tell the codes apart
  int64_t differ = 0, total = 0;
  const auto count = [&] {
    differ = total = 0;
    const ref::RecipeHead head = h.recipe(r);
    const ref::RecipeForward f = ref::recipe_forward(head);
    ref::recipe_backward(head, {f.o.data(), f.lse.data(), h.dout.data(), nullptr, false},
                         [&](const ref::RecipeTile& t) {
                           for (int64_t n = 0; n < t.rows * t.cols; ++n, ++total)
                             differ += t.ds8_query[n] != t.ds8_key[n];
                         });
  };
  count();
  EXPECT_LT(differ, total / 1000) << "nearest: equal but for the rounding of the two folds";
  r.rounding = Rounding::dither;
  count();
  EXPECT_GT(differ, total / 10);
}

/// The mean over seeds comes closer to the exact result of the quantised matmul than nearest
/// rounding does, and keeps doing so with more seeds: the error of dither is noise, that of nearest
/// is not.
TEST(RecipeProperty, DitherAveragesOut) {
  const RandomHead h = RandomHead(128, 300, 64).causal();
  const ExactAnswer exact(h);
  for (Recipe r : {paper_recipe(), vectorwise_recipe()}) {
    // Only the operands that are dithered stay in INT8, so that nothing else is left of the error.
    r.high_precision = kMatmulS | kMatmulSRecompute | kMatmulO;
    const RecipeAnswer nearest(h, r);
    r.rounding = Rounding::dither;
    std::vector<double> dq(h.q.size(), 0.0), dk(h.k.size(), 0.0), dv(dk);
    constexpr int kSeeds = 16;
    double one_seed = 0;
    for (int seed = 0; seed < kSeeds; ++seed) {
      r.seed = static_cast<uint64_t>(seed);
      const RecipeAnswer a(h, r);
      if (seed == 0) one_seed = rel_l2(a.backward.dv, exact.result.dv);
      for (size_t n = 0; n < dq.size(); ++n)
        dq[n] += static_cast<double>(a.backward.dq[n]) / kSeeds;
      for (size_t n = 0; n < dk.size(); ++n)
        dk[n] += static_cast<double>(a.backward.dk[n]) / kSeeds;
      for (size_t n = 0; n < dv.size(); ++n)
        dv[n] += static_cast<double>(a.backward.dv[n]) / kSeeds;
    }
    // Codes of Q, K and dO are rounded to nearest and leave a floor; it is the same on both sides.
    EXPECT_LT(rel_l2(dq, exact.result.dq), 0.7 * rel_l2(nearest.backward.dq, exact.result.dq));
    EXPECT_LT(rel_l2(dv, exact.result.dv), 0.8 * rel_l2(nearest.backward.dv, exact.result.dv));
    EXPECT_LT(rel_l2(dk, exact.result.dk), 0.8 * rel_l2(nearest.backward.dk, exact.result.dk));
    EXPECT_LT(one_seed, 2.5 * rel_l2(nearest.backward.dv, exact.result.dv));
  }
}

std::vector<int64_t> spoilt_rows(const std::vector<float>& x, int64_t d) {
  std::vector<int64_t> rows;
  for (int64_t i = 0; i < static_cast<int64_t>(x.size()) / d; ++i)
    if (std::any_of(&x[i * d], &x[i * d] + d, [](float y) { return !std::isfinite(y); }))
      rows.push_back(i);
  return rows;
}

std::vector<int64_t> spoilt_rows(const std::vector<double>& x, int64_t d) {
  return spoilt_rows(std::vector<float>(x.begin(), x.end()), d);
}

/// One bad token: rows of every output go bad exactly where exact maths says so. Its tile
/// neighbours stay sound.
TEST(RecipeProperty, NanSpreadsAsInExactMaths) {
  for (const Recipe& recipe : {paper_recipe(), vectorwise_recipe()})
    for (int tensor = 0; tensor < 4; ++tensor)
      for (int64_t token : {0, 70, 199}) {
        RandomHead h = RandomHead(200, 200, 32).window(20, 5);
        std::vector<float>* x[4] = {&h.q, &h.k, &h.v, &h.dout};
        (*x[tensor])[token * 32 + 9] = kNan;
        const RecipeAnswer got(h, recipe);
        const ExactAnswer want(h);
        const std::string at =
            std::string(scheme_name(recipe.scheme)) + " tensor " + std::to_string(tensor);
        EXPECT_EQ(spoilt_rows(got.forward.o, 32), spoilt_rows(want.result.o, 32)) << at;
        EXPECT_EQ(spoilt_rows(got.forward.lse, 1), spoilt_rows(want.result.lse, 1)) << at;
        EXPECT_EQ(spoilt_rows(got.backward.dq, 32), spoilt_rows(want.result.dq, 32)) << at;
        EXPECT_EQ(spoilt_rows(got.backward.dk, 32), spoilt_rows(want.result.dk, 32)) << at;
        EXPECT_EQ(spoilt_rows(got.backward.dv, 32), spoilt_rows(want.result.dv, 32)) << at;
        EXPECT_EQ(std::isnan(got.forward.max_logit), std::isnan(want.result.max_logit)) << at;
        EXPECT_FALSE(spoilt_rows(got.backward.dq, 32).empty()) << at;
        EXPECT_LT(spoilt_rows(got.backward.dk, 32).size(), 80u) << at;
      }
}

/// A bad token does not change the accuracy of the tokens beside it.
TEST(RecipeProperty, NeighboursOfABadTokenKeepTheirAccuracy) {
  for (const Recipe& recipe : {paper_recipe(), vectorwise_recipe()})
    for (bool bad_value : {false, true}) {
      RandomHead h = RandomHead(200, 200, 32).window(20, 5);
      const ExactAnswer clean(h);
      (bad_value ? h.v : h.k)[70 * 32 + 3] = kInf;
      const RecipeAnswer got(h, recipe);
      const std::vector<int64_t> bad = spoilt_rows(got.backward.dq, 32);
      trace::ErrorStats dq;
      for (int64_t i = 0; i < 200; ++i)
        if (!std::binary_search(bad.begin(), bad.end(), i))
          dq.add_row(&got.backward.dq[i * 32], &clean.result.dq[i * 32], 32, i);
      dq.finish();
      EXPECT_EQ(dq.count, (200 - 26) * 32) << "26 queries see the token";
      EXPECT_LT(dq.rel_l2, 0.05);
    }
}

/// Infinities never become finite codes: wherever exact maths is not finite, neither is the recipe.
TEST(RecipeProperty, InfinityIsNeverLost) {
  for (const Recipe& recipe : {paper_recipe(), vectorwise_recipe()})
    for (int tensor = 0; tensor < 4; ++tensor) {
      RandomHead h = RandomHead(130, 130, 32).causal();
      std::vector<float>* x[4] = {&h.q, &h.k, &h.v, &h.dout};
      (*x[tensor])[64 * 32 + 9] = -kInf;
      const RecipeAnswer got(h, recipe);
      const ExactAnswer want(h);
      const auto covers = [](const std::vector<int64_t>& a, const std::vector<int64_t>& b) {
        return std::includes(a.begin(), a.end(), b.begin(), b.end());
      };
      EXPECT_TRUE(covers(spoilt_rows(got.forward.o, 32), spoilt_rows(want.result.o, 32))) << tensor;
      EXPECT_TRUE(covers(spoilt_rows(got.backward.dq, 32), spoilt_rows(want.result.dq, 32)))
          << tensor;
      EXPECT_TRUE(covers(spoilt_rows(got.backward.dk, 32), spoilt_rows(want.result.dk, 32)))
          << tensor;
      EXPECT_TRUE(covers(spoilt_rows(got.backward.dv, 32), spoilt_rows(want.result.dv, 32)))
          << tensor;
      EXPECT_LT(spoilt_rows(got.forward.o, 32).size(), 67u)
          << "rows before the bad key or value are untouched";
    }
}

/// Gradients are linear in dO over the whole range of scales, and exact zeros below the threshold.
TEST(RecipeProperty, GradientsAreLinearInTheOutputGradient) {
  const RandomHead h(128, 128, 64);
  for (const Recipe& recipe : {paper_recipe(), vectorwise_recipe()}) {
    const RecipeAnswer one(h, recipe);
    for (int power : {-60, -20, 30}) {
      RandomHead scaled = h;
      for (float& x : scaled.dout) x = std::ldexp(x, power);
      RecipeAnswer got(scaled, recipe);
      for (std::vector<float>* g : {&got.backward.dq, &got.backward.dk, &got.backward.dv})
        for (float& x : *g) x = std::ldexp(x, -power);
      EXPECT_LT(rel_l2(got.backward.dq, one.backward.dq), 1e-6) << power;
      EXPECT_LT(rel_l2(got.backward.dk, one.backward.dk), 1e-6) << power;
      EXPECT_LT(rel_l2(got.backward.dv, one.backward.dv), 1e-6) << power;
    }
    RandomHead tiny = h;
    for (float& x : tiny.dout) x = std::ldexp(x, -110);
    const RecipeAnswer got(tiny, recipe);
    EXPECT_EQ(got.backward.dv, std::vector<float>(h.v.size(), 0.0f));
    EXPECT_EQ(got.backward.dq, std::vector<float>(h.q.size(), 0.0f));
  }
}

}  // namespace
}  // namespace sagebwd
