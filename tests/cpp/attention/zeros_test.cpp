// SPDX-License-Identifier: Apache-2.0
// Zeros give exact zeros and never NaN. Gradients are linear in dO over ninety binary orders of
// magnitude. Large and tiny inputs stay finite.
#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <vector>

#include "support/attention_problem.h"
#include "support/compare.h"
#include "support/implementations.h"

namespace sagebwd::testing {
namespace {

constexpr float kInf = std::numeric_limits<float>::infinity();

void expect_zero(const char* name, const std::vector<float>& x, const AttentionProblem& p) {
  for (size_t i = 0; i < x.size(); ++i)
    ASSERT_EQ(x[i], 0.0f) << name << "[" << i << "] " << p.describe();
}

void expect_finite(const Results& r, const AttentionProblem& p) {
  for (const auto* x : {&r.o, &r.dq, &r.dk, &r.dv})
    for (float v : *x) ASSERT_TRUE(std::isfinite(v)) << p.describe();
}

void scale_all(std::vector<float>& x, float factor) {
  for (float& v : x) v *= factor;
}

class Zeros : public PerImplementation {
 protected:
  const std::vector<std::string> cases = {
      "h2 nq100 nk150 d64 bf16 causal", "h2 nq100 nk150 d64 bf16 paper",
      "h2 nq100 nk150 d64 f32 rounding=dither",
      "h2 nq100 nk150 d64 f32 paper smooth_q=on rounding=dither"};
};

TEST_P(Zeros, ZeroGradientGivesZeroGradients) {
  for (const std::string& text : cases) {
    AttentionProblem p = make_problem(text);
    scale_all(p.in.dout, 0.0f);
    const Results r = run(impl(), p);
    expect_zero("dQ", r.dq, p), expect_zero("dK", r.dk, p), expect_zero("dV", r.dv, p);
    expect_finite(r, p);
  }
}

TEST_P(Zeros, ZeroValuesGiveZeroOutput) {
  for (const std::string& text : cases) {
    AttentionProblem p = make_problem(text);
    scale_all(p.in.v, 0.0f);
    const Results r = run(impl(), p);
    expect_zero("O", r.o, p), expect_zero("dQ", r.dq, p), expect_zero("dK", r.dk, p);
    EXPECT_TRUE(close("dV", r.dv, exact(p).dv, p.k_shape(), {.rel_l2 = 0.08}, p));
  }
}

TEST_P(Zeros, ZeroQueriesAttendUniformly) {
  for (const std::string& text : cases) {
    AttentionProblem p = make_problem(text);
    scale_all(p.in.q, 0.0f);
    const Results r = run(impl(), p);
    const Exact want = exact(p);
    expect_zero("dK", r.dk, p);
    EXPECT_TRUE(elementwise("LSE", r.lse, want.lse, p.row_shape(), 1e-5, 0, p));
    EXPECT_TRUE(close("O", r.o, want.o, p.q_shape(), {.rel_l2 = 0.05}, p));
    EXPECT_TRUE(close("dV", r.dv, want.dv, p.k_shape(), {.rel_l2 = 0.08}, p));
    expect_finite(r, p);
  }
}

TEST_P(Zeros, ZeroKeysAttendUniformly) {
  for (const std::string& text : cases) {
    AttentionProblem p = make_problem(text);
    scale_all(p.in.k, 0.0f);
    const Results r = run(impl(), p);
    expect_zero("dQ", r.dq, p);
    EXPECT_TRUE(elementwise("LSE", r.lse, exact(p).lse, p.row_shape(), 1e-5, 0, p));
    expect_finite(r, p);
  }
}

TEST_P(Zeros, EverythingZero) {
  for (const std::string& text : cases) {
    AttentionProblem p = make_problem(text);
    for (auto* x : {&p.in.q, &p.in.k, &p.in.v, &p.in.dout}) scale_all(*x, 0.0f);
    const Results r = run(impl(), p);
    expect_zero("O", r.o, p), expect_zero("dQ", r.dq, p), expect_zero("dK", r.dk, p);
    expect_zero("dV", r.dv, p);
  }
}

/// A zero token, a zero tile and a zero channel, in each input in turn.
TEST_P(Zeros, PartsOfAnInput) {
  for (const char* text :
       {"h2 n300 d64 f32", "h2 n300 d64 f32 paper causal", "h2 n300 d64 f32 causal"})
    for (int tensor = 0; tensor < 4; ++tensor)
      for (int part = 0; part < 3; ++part) {
        AttentionProblem p = make_problem(text);
        std::vector<float>* inputs[] = {&p.in.q, &p.in.k, &p.in.v, &p.in.dout};
        for (int64_t i = 0; i < p.c.q_elements(); ++i) {
          const int64_t token = i / p.c.d % p.c.nq, channel = i % p.c.d;
          if (part == 0 ? token % 7 == 3 : part == 1 ? token < 128 : channel == 5)
            (*inputs[tensor])[i] = 0.0f;
        }
        const Results r = run(impl(), p);
        EXPECT_TRUE(accurate(r, exact(p), {.o = 0.05, .dq = 0.1, .dk = 0.1, .dv = 0.1}, p))
            << "tensor " << tensor << " part " << part;
        if (tensor != 3 || part != 0) continue;
        for (int64_t i = 0; i < p.c.q_elements(); ++i) {  // no gradient comes in, none goes out
          if (i / p.c.d % p.c.nq % 7 != 3) continue;
          ASSERT_EQ(r.dq[i], 0.0f) << i;
        }
      }
}

TEST_P(Zeros, RowsAndTilesWithoutKeys) {
  // The first 120 queries see nothing, nor does anyone see the keys after the window.
  const AttentionProblem p = make_problem("h2 nq270 nk150 d64 f32 causal window=10,0");
  const Results r = run(impl(), p);
  expect_finite(r, p);
  for (int64_t h = 0; h < 2; ++h)
    for (int64_t i = 0; i < 120; ++i) {
      EXPECT_EQ(r.lse[h * 270 + i], -kInf);
      for (int64_t c = 0; c < 64; ++c) {
        EXPECT_EQ(r.o[(h * 270 + i) * 64 + c], 0.0f);
        EXPECT_EQ(r.dq[(h * 270 + i) * 64 + c], 0.0f);
      }
    }
  const AttentionProblem q = make_problem("h2 nq100 nk400 d64 f32 window=0,10 align=top_left");
  const Results s = run(impl(), q);
  for (int64_t h = 0; h < 2; ++h)
    for (int64_t j = 110; j < 400; ++j)
      for (int64_t c = 0; c < 64; ++c) {
        ASSERT_EQ(s.dk[(h * 400 + j) * 64 + c], 0.0f);
        ASSERT_EQ(s.dv[(h * 400 + j) * 64 + c], 0.0f);
      }
}

SAGE_FOR_ALL_IMPLEMENTATIONS(Zeros);

class Scaling : public PerImplementation {};

/// dO times a power of two: every gradient times that power.
TEST_P(Scaling, GradientsAreLinearInTheOutputGradient) {
  for (const char* text :
       {"h2 nq150 nk200 d64 bf16", "h2 nq150 nk200 d64 bf16 paper causal", "h2 n150 d64 f32"}) {
    const AttentionProblem p = make_problem(text);
    const Results base = run(impl(), p);
    for (int shift : {-60, -40, -17, -1, 3, 15, 30}) {
      AttentionProblem q = p;
      scale_all(q.in.dout, std::ldexp(1.0f, shift));
      Results r = run(impl(), q);
      for (auto* x : {&r.dq, &r.dk, &r.dv})
        for (float& v : *x) v = std::ldexp(v, -shift);
      EXPECT_TRUE(close("dQ", r.dq, base.dq, p.q_shape(), {.rel_l2 = 1e-6}, q)) << shift;
      EXPECT_TRUE(close("dK", r.dk, base.dk, p.k_shape(), {.rel_l2 = 1e-6}, q)) << shift;
      EXPECT_TRUE(close("dV", r.dv, base.dv, p.k_shape(), {.rel_l2 = 1e-6}, q)) << shift;
    }
  }
}

/// Decimal factors, as a loss averaged over many tokens makes them: same cosine to the exact
/// gradient.
TEST_P(Scaling, SmallLossScalesKeepTheirAccuracy) {
  for (float factor : {1e-5f, 1e-8f, 1e-12f}) {
    AttentionProblem p = make_problem("h2 n200 d64 bf16");
    scale_all(p.in.dout, factor);
    p.round_inputs();
    EXPECT_TRUE(accurate(run(impl(), p), exact(p),
                         {.o = 0.03, .dq = 0.03, .dk = 0.04, .dv = 0.03, .one_minus_cosine = 1e-3},
                         p))
        << factor;
  }
}

TEST_P(Scaling, BelowTheSmallestScaleGradientsAreZero) {
  AttentionProblem p = make_problem("h2 n200 d64 f32");
  scale_all(p.in.dout, 1e-30f);
  expect_finite(run(impl(), p), p);
  scale_all(p.in.dout, 1e-6f);
  const Results r = run(impl(), p);
  expect_zero("dQ", r.dq, p), expect_zero("dK", r.dk, p), expect_zero("dV", r.dv, p);
}

TEST_P(Scaling, LargeQueriesStayFinite) {
  for (const char* text : {"h2 n200 d64 bf16", "h2 n200 d64 bf16 paper causal"}) {
    AttentionProblem p = make_problem(text);
    scale_all(p.in.q, 1e4f);
    p.round_inputs();
    const Results r = run(impl(), p);
    expect_finite(r, p);
    // Each row has one winner by far: O is its value, unless the second is nearer to it than the
    // rounding of K.
    EXPECT_TRUE(close("O", r.o, exact(p).o, p.q_shape(), {.rel_l2 = 0.25}, p));
  }
}

TEST_P(Scaling, LargeValuesStayFinite) {
  AttentionProblem p = make_problem("h2 n200 d64 bf16");
  scale_all(p.in.v, 1e15f);
  scale_all(p.in.dout, 1e15f);
  p.round_inputs();
  EXPECT_TRUE(
      accurate(run(impl(), p), exact(p), {.o = 0.03, .dq = 0.03, .dk = 0.04, .dv = 0.03}, p));
}

TEST_P(Scaling, HalfPrecisionSubnormals) {
  AttentionProblem p = make_problem("h2 n200 d64 f16");
  scale_all(p.in.v, 1e-6f);  // the smallest normal half is 6.1e-5, steps below it are 6e-8
  p.round_inputs();
  const Results r = run(impl(), p);
  const Exact want = exact(p);
  EXPECT_TRUE(elementwise("O", r.o, want.o, p.q_shape(), 6e-8, 0.05, p));
  EXPECT_TRUE(close("dV", r.dv, want.dv, p.k_shape(), {.rel_l2 = 0.03}, p));
}

SAGE_FOR_ALL_IMPLEMENTATIONS(Scaling);

}  // namespace
}  // namespace sagebwd::testing
