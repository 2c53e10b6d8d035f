// SPDX-License-Identifier: Apache-2.0
// The oracle behind the public API: views, groups of heads, documents, element types.
#include "ref/ref.h"

#include <gtest/gtest.h>

#include "base/half.h"
#include "ref/attention_recipe.h"
#include "support/attention_problem.h"
#include "support/compare.h"

namespace sagebwd {
namespace {

using testing::AttentionProblem;
using testing::make_problem;
using testing::one_head;
using testing::OneHead;
using testing::Results;

const backend::Implementation& ref_impl() { return ref::implementation(); }

TEST(RefImplementation, DeclinesOtherDevices) {
  spec::Problem p{};
  p.device = Device::cuda;
  EXPECT_FALSE(ref_impl().decline(p).empty());
  p.device = Device::cpu;
  EXPECT_TRUE(ref_impl().decline(p).empty());
}

TEST(RefImplementation, TilesComeFromTheRecipeOrTheScheme) {
  spec::Problem p{};
  p.recipe = Recipe::vectorwise();
  EXPECT_EQ(ref_impl().tiles(p).q, 64);
  EXPECT_EQ(ref_impl().tiles(p).k, 128);
  p.recipe.scheme = Scheme::paper;
  EXPECT_EQ(ref_impl().tiles(p).q, 128);
  EXPECT_EQ(ref_impl().tiles(p).k, 64);
  p.recipe.tile_q = 256, p.recipe.tile_k = 192;
  EXPECT_EQ(ref_impl().tiles(p).q, 256);
  EXPECT_EQ(ref_impl().tiles(p).k, 192);
}

/// dK and dV of a key head are the sums over its query heads; everything else is head by head.
TEST(RefImplementation, GroupsOfHeadsAddUp) {
  const AttentionProblem p = make_problem("b2 h6 hk2 n70 d32 causal f32");
  const Results got = testing::run(ref_impl(), p);
  for (int64_t b = 0; b < 2; ++b)
    for (int64_t hk = 0; hk < 2; ++hk) {
      std::vector<float> dk(70 * 32, 0.0f), dv(dk);
      for (int64_t h = hk * 3; h < hk * 3 + 3; ++h) {
        const OneHead one = one_head(ref_impl(), p, b, h);
        const ref::RecipeForward f = ref::recipe_forward(one.head);
        const ref::RecipeBackward g = ref::recipe_backward(
            one.head, {f.o.data(), f.lse.data(), one.dout.data(), nullptr, false});
        for (size_t n = 0; n < dk.size(); ++n) dk[n] += g.dk[n], dv[n] += g.dv[n];
        const int64_t at = (b * 6 + h) * 70 * 32;
        EXPECT_TRUE(std::equal(f.o.begin(), f.o.end(), got.o.begin() + at));
        EXPECT_TRUE(std::equal(g.dq.begin(), g.dq.end(), got.dq.begin() + at));
        EXPECT_EQ(got.max_logit[b * 6 + h], f.max_logit);
      }
      const int64_t at = (b * 2 + hk) * 70 * 32;
      EXPECT_TRUE(std::equal(dk.begin(), dk.end(), got.dk.begin() + at));
      EXPECT_TRUE(std::equal(dv.begin(), dv.end(), got.dv.begin() + at));
    }
}

/// A packed batch is its documents one by one: means, tiles and dither keys are a document's own.
TEST(RefImplementation, DocumentsAreProblemsOfTheirOwn) {
  AttentionProblem p = make_problem("h2 nq150 nk160 d32 causal f32 rounding=dither seed7");
  p.cu_q = {0, 90, 90, 150}, p.cu_k = {0, 90, 95, 160};  // the second document has no queries
  const Results got = testing::run(ref_impl(), p);
  for (int64_t t = 0; t < 3; ++t) {
    const int64_t h = 1, q0 = p.cu_q[t], k0 = p.cu_k[t];
    const OneHead one = one_head(ref_impl(), p, t, h);
    const ref::RecipeForward f = ref::recipe_forward(one.head);
    const ref::RecipeBackward g =
        ref::recipe_backward(one.head, {f.o.data(), f.lse.data(), one.dout.data(), nullptr, false});
    EXPECT_TRUE(std::equal(f.o.begin(), f.o.end(), got.o.begin() + (h * 150 + q0) * 32)) << t;
    EXPECT_TRUE(std::equal(f.lse.begin(), f.lse.end(), got.lse.begin() + h * 150 + q0)) << t;
    EXPECT_TRUE(std::equal(g.dq.begin(), g.dq.end(), got.dq.begin() + (h * 150 + q0) * 32)) << t;
    EXPECT_TRUE(std::equal(g.dk.begin(), g.dk.end(), got.dk.begin() + (h * 160 + k0) * 32)) << t;
    EXPECT_TRUE(std::equal(g.dv.begin(), g.dv.end(), got.dv.begin() + (h * 160 + k0) * 32)) << t;
    EXPECT_EQ(got.max_logit[t * 2 + h], f.max_logit);
  }
  for (int64_t n = (160 + 90) * 32; n < (160 + 95) * 32; ++n) ASSERT_EQ(got.dk[n], 0.0f);
}

/// 16-bit tensors hold the FP32 results rounded once. The backward sees the rounded O.
TEST(RefImplementation, SixteenBitTensorsHoldRoundedResults) {
  for (const char* type : {"bf16", "f16"}) {
    const AttentionProblem p = make_problem(std::string("h1 n100 d64 causal ") + type);
    const Results got = testing::run(ref_impl(), p);
    const OneHead one = one_head(ref_impl(), p, 0, 0);
    const auto rounded = [&](std::vector<float> x) {
      for (float& y : x)
        y = p.c.dtype == Dtype::bf16 ? to_float(from_float<bf16>(y)) : to_float(from_float<f16>(y));
      return x;
    };
    const ref::RecipeForward f = ref::recipe_forward(one.head);
    const std::vector<float> o = rounded(f.o);
    EXPECT_EQ(got.o, o);
    EXPECT_EQ(got.lse, f.lse);
    const ref::RecipeBackward g =
        ref::recipe_backward(one.head, {o.data(), f.lse.data(), one.dout.data(), nullptr, false});
    EXPECT_EQ(got.dq, rounded(g.dq));
    EXPECT_EQ(got.dk, rounded(g.dk));
    EXPECT_EQ(got.dv, rounded(g.dv));
  }
}

TEST(RefImplementation, LseGradientAndPartialKeysReachTheOracle) {
  AttentionProblem p = make_problem("h2 hk1 nq60 nk80 d32 f32", trace::InputKind::offset);
  p.dlse = testing::random_rows(p, 3);
  for (bool partial : {false, true}) {
    p.partial_kv = partial;
    const Results got = testing::run(ref_impl(), p);
    const OneHead one = one_head(ref_impl(), p, 0, 1);
    const ref::RecipeForward f = ref::recipe_forward(one.head);
    const ref::RecipeBackward g = ref::recipe_backward(
        one.head, {f.o.data(), f.lse.data(), one.dout.data(), one.dlse.data(), partial});
    EXPECT_TRUE(std::equal(g.dq.begin(), g.dq.end(), got.dq.begin() + 60 * 32)) << partial;
  }
}

}  // namespace
}  // namespace sagebwd
