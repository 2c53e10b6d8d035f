// SPDX-License-Identifier: Apache-2.0
#include "trace/compare_head.h"

#include <gtest/gtest.h>

#include <cstring>

#include "ref/random_head.h"

namespace sagebwd::trace {
namespace {

using testing::ExactAnswer;
using testing::paper_recipe;
using testing::RandomHead;
using testing::rel_l2;
using testing::vectorwise_recipe;

HeadErrors errors_of(const RandomHead& h, const Recipe& recipe, Dtype dtype = Dtype::f32,
                     const HeadOutputs& given = {}) {
  return compare_head(h.recipe(recipe), h.dout.data(), dtype, given);
}

/// The figures are those of the oracles run by hand.
TEST(CompareHead, OutputsAreTheOracles) {
  const RandomHead h = RandomHead(150, 200, 64).causal();
  for (const Recipe& recipe : {paper_recipe(), vectorwise_recipe()}) {
    const HeadErrors e = errors_of(h, recipe);
    const testing::RecipeAnswer got(h, recipe);
    const ExactAnswer want(h);
    EXPECT_NEAR(e.o.rel_l2, rel_l2(got.forward.o, want.result.o), 1e-12);
    EXPECT_NEAR(e.dq.rel_l2, rel_l2(got.backward.dq, want.result.dq), 1e-12);
    EXPECT_NEAR(e.dk.rel_l2, rel_l2(got.backward.dk, want.result.dk), 1e-12);
    EXPECT_NEAR(e.dv.rel_l2, rel_l2(got.backward.dv, want.result.dv), 1e-12);
    EXPECT_NEAR(e.delta.rel_l2, rel_l2(got.backward.delta, want.result.delta), 1e-12);
    EXPECT_EQ(e.dq.count, 150 * 64);
    EXPECT_EQ(e.dk.count, 200 * 64);
  }
}

TEST(CompareHead, ScoresCoverEveryVisibleEntryOnce) {
  const RandomHead h = RandomHead(150, 200, 32).causal();
  const HeadErrors e = errors_of(h, vectorwise_recipe());
  const int64_t visible = 150 * 51 + 150 * 149 / 2;
  for (const ErrorStats* s :
       {&e.s, &e.p, &e.p_unquantised, &e.dp, &e.ds, &e.ds_for_dk, &e.ds_unquantised})
    EXPECT_EQ(s->count, visible);
}

TEST(CompareHead, NothingQuantisedNothingLost) {
  RandomHead h = RandomHead(150, 150, 64).causal();
  for (float& x : h.k) x += 2.0f;  // S is of the true logits, the mean key included
  Recipe recipe = vectorwise_recipe();
  recipe.high_precision = kMatmulAll;
  const HeadErrors e = errors_of(h, recipe);
  for (const auto& [name, stats] : HeadErrors::names()) {
    EXPECT_LT((e.*stats).rel_l2, 1e-5) << name;
    EXPECT_GT((e.*stats).count, 0) << name;
  }
}

TEST(CompareHead, ErrorsSitWhereTheQuantisationIs) {
  const RandomHead h(256, 256, 64);
  Recipe recipe = vectorwise_recipe();
  recipe.high_precision = kMatmulAll & ~static_cast<uint32_t>(kMatmulDQ);
  HeadErrors e = errors_of(h, recipe);
  EXPECT_GT(e.ds.rel_l2, 0.005) << "as dQ uses it";
  EXPECT_GT(e.dq.rel_l2, 0.005);
  EXPECT_LT(e.ds_for_dk.rel_l2, 1e-5);
  EXPECT_LT(e.ds_unquantised.rel_l2, 1e-5);
  EXPECT_LT(e.dk.rel_l2, 1e-5);
  EXPECT_LT(e.p.rel_l2, 1e-5);

  recipe.high_precision = kMatmulAll & ~static_cast<uint32_t>(kMatmulDV);
  e = errors_of(h, recipe);
  EXPECT_GT(e.p.rel_l2, 0.005);
  EXPECT_LT(e.p_unquantised.rel_l2, 1e-5);
  EXPECT_GT(e.dv.rel_l2, 0.005);
  EXPECT_LT(e.dq.rel_l2, 1e-5);

  recipe.high_precision = kMatmulAll & ~static_cast<uint32_t>(kMatmulO);
  e = errors_of(h, recipe);
  EXPECT_GT(e.delta.rel_l2, 0.005) << "D inherits the error of O";
  EXPECT_GT(e.ds_unquantised.rel_l2, 1e-5);
  EXPECT_LT(e.s.rel_l2, 1e-5);
  EXPECT_GT(e.dp.rel_l2, 0.004) << "dP has the error of V's codes";
  EXPECT_LT(e.dp.rel_l2, 0.008);
  recipe.scheme = Scheme::paper;
  EXPECT_LT(errors_of(h, recipe).dp.rel_l2, 1e-5) << "in `paper` it has not";
}

TEST(CompareHead, OutputIsRoundedToItsType) {
  const RandomHead h = RandomHead(100, 100, 64).bf16_inputs();
  Recipe recipe = vectorwise_recipe();
  recipe.high_precision = kMatmulAll;
  const double f32 = errors_of(h, recipe, Dtype::f32).o.rel_l2,
               f16 = errors_of(h, recipe, Dtype::f16).o.rel_l2,
               bf16_error = errors_of(h, recipe, Dtype::bf16).o.rel_l2;
  EXPECT_LT(f32, 1e-6);
  EXPECT_NEAR(f16, 2e-4, 1e-4);
  EXPECT_NEAR(bf16_error, 1.65e-3, 5e-4);
}

TEST(CompareHead, GivenOutputsAreJudgedInstead) {
  const RandomHead h(80, 90, 32);
  const ExactAnswer exact(h);
  const std::vector<float> dk(exact.result.dk.begin(), exact.result.dk.end());
  HeadOutputs given;
  given.dk = dk.data();
  const HeadErrors own = errors_of(h, paper_recipe()),
                   e = errors_of(h, paper_recipe(), Dtype::f32, given);
  EXPECT_LT(e.dk.rel_l2, 1e-7);
  EXPECT_GT(own.dk.rel_l2, 1e-3);
  EXPECT_EQ(e.dq.rel_l2, own.dq.rel_l2);
}

TEST(CompareHead, HeadsAppend) {
  const RandomHead a(64, 64, 32, 1.0, 1), b(64, 64, 32, 1.0, 2);
  HeadErrors both = errors_of(a, paper_recipe());
  const HeadErrors second = errors_of(b, paper_recipe());
  const double first = both.dq.rel_l2;
  both.append(second);
  both.finish();
  EXPECT_EQ(both.dq.count, 2 * 64 * 32);
  EXPECT_GE(both.dq.rel_l2, std::min(first, second.dq.rel_l2));
  EXPECT_LE(both.dq.rel_l2, std::max(first, second.dq.rel_l2));
  EXPECT_NE(first, second.dq.rel_l2);
}

TEST(CompareHead, TokensWithoutGradientDoNotCountAsErrors) {
  RandomHead h(128, 128, 32);
  for (int64_t n = 0; n < 64 * 32; ++n) h.dout[n] = 0.0f;  // ignored tokens of a loss
  const HeadErrors e = errors_of(h, vectorwise_recipe());
  EXPECT_LT(e.p.rel_l2, 0.03);
  EXPECT_TRUE(std::isfinite(e.ds.rel_l2));
}

}  // namespace
}  // namespace sagebwd::trace
