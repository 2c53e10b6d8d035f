// SPDX-License-Identifier: Apache-2.0
// How far forward and backward are from FP64 and from the straight-through gradient of the
// quantised forward, and whether any single row is left behind.
//
// Budgets of `vectorwise` are about 1.3 times the most that it measures on these inputs (O .0193,
// dQ .0233, dK .0187, dV .0169 with 127 levels of P; O .0143, dV .0135 with 255): rounding passes,
// a wrong scale or a lost tile does not. `paper` has one dS scale per tile and cannot meet them;
// its budgets are 1.3 times what the recipe measures (O .020, dQ and dK .060, dV .060).
#include <gtest/gtest.h>

#include <cmath>
#include <cstdio>
#include <string>
#include <vector>

#include "numerics/octaves.h"
#include "numerics/rotate.h"
#include "support/attention_problem.h"
#include "support/compare.h"
#include "support/implementations.h"

namespace sagebwd::testing {
namespace {

using trace::InputKind;

constexpr Budgets kVectorwise{
    .o = 0.025, .dq = 0.03, .dk = 0.025, .dv = 0.022, .one_minus_cosine = 1e-3};
constexpr Budgets kPaper{
    .o = 0.026, .dq = 0.078, .dk = 0.078, .dv = 0.078, .one_minus_cosine = 4e-3};

const Budgets& budgets_of(const AttentionProblem& p) {
  return p.c.recipe.scheme == Scheme::paper ? kPaper : kVectorwise;
}

/// Prints our error beside that of 16-bit attention.
void report(const AttentionProblem& p, const Results& got, const Exact& want) {
  const Exact yardstick = bf16_attention(p);
  const auto rel = [&](const std::vector<float>& x, const std::vector<double>& r, const Shape& s) {
    return error_stats(x, r, s).rel_l2;
  };
  const auto narrowed = [](const std::vector<double>& x) {
    return std::vector<float>(x.begin(), x.end());
  };
  const double ours[] = {rel(got.o, want.o, p.q_shape()), rel(got.dq, want.dq, p.q_shape()),
                         rel(got.dk, want.dk, p.k_shape()), rel(got.dv, want.dv, p.k_shape())};
  const double theirs[] = {rel(narrowed(yardstick.o), want.o, p.q_shape()),
                           rel(narrowed(yardstick.dq), want.dq, p.q_shape()),
                           rel(narrowed(yardstick.dk), want.dk, p.k_shape()),
                           rel(narrowed(yardstick.dv), want.dv, p.k_shape())};
  const char* names[] = {"O", "dQ", "dK", "dV"};
  for (int i = 0; i < 4; ++i) {
    std::printf("  %s %.4f, 16-bit attention %.4f, ratio %.1f\n", names[i], ours[i], theirs[i],
                ours[i] / theirs[i]);
    EXPECT_LT(theirs[i], 0.005) << "the yardstick itself";
  }
}

struct AccuracyCase {
  const char* text;
  bool qk_norm;
};
void PrintTo(const AccuracyCase& c, std::ostream* out) {
  *out << c.text << (c.qk_norm ? " with QK-norm" : "");
}

class Accuracy : public ::testing::TestWithParam<AccuracyCase> {};

TEST_P(Accuracy, StaysWithinTheBudgetsOfItsRecipe) {
  const AccuracyCase& c = GetParam();
  Exact want;
  for (const char* recipe : {"vectorwise", "paper"}) {
    AttentionProblem p = make_problem(std::string(c.text) + " " + recipe);
    if (c.qk_norm) apply_qk_norm(p);
    if (want.o.empty()) want = exact(p);
    const Results fast = run(fastest(), p);
    EXPECT_TRUE(accurate(fast, want, budgets_of(p), p)) << fastest().name;
    // The parity tests compare the slower ones with the recipe; here they repeat the small cases.
    if (p.c.nq <= 512) {
      for (const dispatch::Implementation* impl : available_production())
        EXPECT_TRUE(accurate(run(*impl, p), want, budgets_of(p), p)) << impl->name;
    }
    if (p.c.recipe.scheme == Scheme::vectorwise) {
      std::printf("%s%s\n", p.describe().c_str(), c.qk_norm ? " with QK-norm" : "");
      report(p, fast, want);
    }
  }
}

INSTANTIATE_TEST_SUITE_P(, Accuracy,
                         ::testing::Values(AccuracyCase{"h2 n512 d64 bf16", false},
                                           AccuracyCase{"h2 n512 d64 bf16 causal", false},
                                           AccuracyCase{"h2 n512 d64 bf16", true},
                                           AccuracyCase{"h2 n512 d64 bf16 causal", true},
                                           AccuracyCase{"h1 n512 d128 bf16", false},
                                           AccuracyCase{"h1 n512 d128 f16 causal", true},
                                           AccuracyCase{"h1 n512 d128 f32 causal", false},
                                           AccuracyCase{"h1 n2048 d64 bf16 causal", true},
                                           AccuracyCase{"h1 n2048 d128 bf16", false}));

/// Exact attention on the values that the codes of Q, K and V stand for: the gradient of what
/// the forward computed. With key tiles of 128 the per-query scale of dS spans twice the keys, and
/// dQ is .0186 instead of .0154. The others are at most O .0163, dK .0134, dV .0138, with 127
/// levels of P.
TEST(StraightThrough, GradientsMatchTheQuantisedForward) {
  struct Case {
    const char* text;
    double dq;
  };
  for (const Case& c :
       {Case{"n512 d64 bf16 tile=64x64", 0.017}, Case{"n512 d64 bf16 causal tile=64x64", 0.017},
        Case{"n512 d64 bf16", 0.021}, Case{"n512 d128 bf16", 0.021}}) {
    const AttentionProblem p = make_problem(c.text);
    const OneHead one = one_head(reference(), p, 0, 0);
    const ref::RecipeInputs in = ref::recipe_forward(one.head).inputs;
    AttentionProblem quantised = p;
    const int64_t d = p.c.d;
    for (int64_t i = 0; i < p.c.nq * d; ++i)
      quantised.in.q[i] = static_cast<float>(in.q8[i]) * in.q_scale[i / d];
    for (int64_t i = 0; i < p.c.nk * d; ++i) {
      const int octave = numerics::octave_of_block(i / d / kKeysPerScale);
      quantised.in.k[i] =
          static_cast<float>(in.k8[i]) * in.k_scale[i / d] +
          static_cast<float>(in.centre8[octave * d + i % d]) * in.centre_scale[octave];
      quantised.in.v[i] =
          static_cast<float>(in.v8[i]) * in.v_scale[i / d] +
          static_cast<float>(in.v_centre8[octave * d + i % d]) * in.v_centre_scale[octave];
    }
    for (int64_t i = 0; i < p.c.nq; ++i) {
      numerics::rotate_back(&quantised.in.q[i * d], static_cast<int>(d));
      numerics::rotate_back(&quantised.in.k[i * d], static_cast<int>(d));
    }
    const Exact want = exact(quantised);
    for (const dispatch::Implementation* impl : available_production())
      EXPECT_TRUE(
          accurate(run(*impl, p), want, {.o = 0.018, .dq = c.dq, .dk = 0.016, .dv = 0.016}, p))
          << impl->name;
  }
}

/// A small total error can hide rows that are wrong altogether.
TEST(RowFairness, FewRowsAreOffByHalf) {
  for (InputKind kind : {InputKind::gaussian, InputKind::sink, InputKind::long_rows}) {
    for (const char* text : {"h8 n512 d64 bf16", "h8 n512 d64 bf16 causal"}) {
      const AttentionProblem p = make_problem(text, kind);
      const Exact want = exact(p);
      for (const dispatch::Implementation* impl : available_production()) {
        const Results got = run(*impl, p);
        EXPECT_LE(error_stats(got.dq, want.dq, p.q_shape()).bad_row_fraction, 0.005)
            << impl->name << " " << trace::input_name(kind) << " " << p.describe();
        EXPECT_LE(error_stats(got.dk, want.dk, p.k_shape()).bad_row_fraction, 0.005)
            << impl->name << " " << trace::input_name(kind) << " " << p.describe();
      }
    }
  }
}

}  // namespace
}  // namespace sagebwd::testing
