// SPDX-License-Identifier: Apache-2.0
// V has one scale per token, which is folded into P: into the exponent of the softmax, and out of
// its sum. Values of any size must leave LSE, the largest logit and each other alone.
#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <string>
#include <vector>

#include "support/attention_problem.h"
#include "support/compare.h"
#include "support/implementations.h"

namespace sagebwd::testing {
namespace {

constexpr float kInf = std::numeric_limits<float>::infinity();

void scale_token(AttentionProblem& p, int64_t token, float factor) {
  for (int64_t bh = 0; bh < p.c.b * p.c.hk; ++bh)
    for (int64_t c = 0; c < p.c.d; ++c) p.in.v[(bh * p.c.nk + token) * p.c.d + c] *= factor;
}

constexpr Budgets kVectorwise{.o = 0.03, .dq = 0.035, .dk = 0.035, .dv = 0.03};

/// LSE and max_logit depend on Q and K alone.
void expect_same_statistics(const Results& got, const Results& clean, const AttentionProblem& p) {
  EXPECT_TRUE(elementwise("LSE", got.lse, widened(clean.lse), p.row_shape(), 1e-5, 0, p));
  for (size_t i = 0; i < clean.max_logit.size(); ++i)
    EXPECT_NEAR(got.max_logit[i], clean.max_logit[i], 2e-5) << p.describe();
}

class Values : public PerImplementation {
 protected:
  const std::vector<std::string> cases = {"h2 nq150 nk300 d64 f32", "h2 nq150 nk300 d64 f32 causal",
                                          "h2 nq150 nk300 d64 f32 tile=64x64"};
};

/// Some tokens have no value, or hardly one; so has a whole block of 128.
TEST_P(Values, TokensWithoutValue) {
  for (const std::string& text : cases)
    for (float small : {0.0f, 1e-30f, 1e-12f}) {
      const AttentionProblem plain = make_problem(text);
      AttentionProblem p = plain;
      for (int64_t j : {0, 5, 130, 299}) scale_token(p, j, small);
      const Results got = run(impl(), p);
      EXPECT_TRUE(accurate(got, exact(p), kVectorwise, p)) << small;
      expect_same_statistics(got, run(impl(), plain), p);

      for (int64_t j = 128; j < 256; ++j) scale_token(p, j, small);
      EXPECT_TRUE(accurate(run(impl(), p), exact(p), kVectorwise, p)) << small << ", a block";
    }
}

/// One value is larger than the others by far. Rows are mostly that value; causal rows before it
/// do not notice.
TEST_P(Values, OneLargeValue) {
  for (float large : {1e3f, 1e8f}) {
    const AttentionProblem plain = make_problem("h2 n300 d64 f32 causal");
    AttentionProblem p = plain;
    scale_token(p, 200, large);
    const Results got = run(impl(), p), clean = run(impl(), plain);
    const Exact want = exact(p);
    EXPECT_TRUE(accurate(got, want, {.o = 0.03, .dq = 0.06, .dk = 0.06, .dv = 0.03}, p)) << large;
    expect_same_statistics(got, clean, p);
    for (int64_t i = 0; i < 200; ++i)
      for (int64_t c = 0; c < 64; ++c) ASSERT_EQ(got.o[i * 64 + c], clean.o[i * 64 + c]) << i;
  }
}

TEST_P(Values, WholeTensorsOfAnySize) {
  for (const std::string& text : cases) {
    const AttentionProblem plain = make_problem(text);
    const Results clean = run(impl(), plain);
    for (int shift : {-30, 30, 80}) {
      AttentionProblem p = plain;
      for (float& v : p.in.v) v = std::ldexp(v, shift);
      Results got = run(impl(), p, {.backward = false});
      expect_same_statistics(got, clean, p);
      for (float& o : got.o) o = std::ldexp(o, -shift);
      EXPECT_TRUE(close("O", got.o, clean.o, p.q_shape(), {.rel_l2 = 1e-3}, p)) << shift;
    }
    // A scale of V is at least 2^-40, so that what is smaller by far counts as its octave's centre.
    AttentionProblem p = plain;
    for (float& v : p.in.v) v = std::ldexp(v, -80);
    const Results got = run(impl(), p);
    expect_same_statistics(got, clean, p);
    for (float o : got.o) ASSERT_LT(std::fabs(o), 0x1p-78f) << p.describe();
    for (float dq : got.dq) ASSERT_LT(std::fabs(dq), 0x1p-76f) << p.describe();
  }
}

/// NaN or Inf in a value: rows that see it are not finite, LSE is, and other rows are what they
/// were.
TEST_P(Values, ValuesThatAreNotFinite) {
  for (float bad : {std::nanf(""), kInf}) {
    const AttentionProblem plain = make_problem("h2 n300 d64 f32 causal");
    AttentionProblem p = plain;
    p.in.v[200 * 64 + 3] = bad;
    const Results got = run(impl(), p), clean = run(impl(), plain);
    for (int64_t i = 0; i < 300; ++i) {
      EXPECT_EQ(std::isfinite(got.o[i * 64 + 3]), i < 200) << i;
      EXPECT_NEAR(got.lse[i], clean.lse[i], 1e-5) << i;
      EXPECT_EQ(std::isfinite(got.dq[i * 64]), i < 200) << i;
    }
    const Exact want = exact(plain);
    const size_t rows = 200 * 64;  // of the first head
    const std::vector<float> o(got.o.begin(), got.o.begin() + rows),
        dq(got.dq.begin(), got.dq.begin() + rows);
    EXPECT_TRUE(close("O", o, std::vector<double>(want.o.begin(), want.o.begin() + rows),
                      {1, 1, 200, 64}, {.rel_l2 = 0.03}, p));
    EXPECT_TRUE(close("dQ", dq, std::vector<double>(want.dq.begin(), want.dq.begin() + rows),
                      {1, 1, 200, 64}, {.rel_l2 = 0.04}, p));
    EXPECT_TRUE(std::equal(got.o.begin() + 300 * 64, got.o.end(), clean.o.begin() + 300 * 64))
        << "the other head";
    EXPECT_NEAR(got.max_logit[0], clean.max_logit[0], 1e-5);
  }
}

/// The key with the largest logit has the smallest value.
TEST_P(Values, LargestLogitIsThatOfTheLogits) {
  for (const char* recipe : {"", " paper", " lift=O", " tile=64x64"}) {
    AttentionProblem p = make_problem(std::string("h2 n300 d64 f32") + recipe);
    for (int64_t bh = 0; bh < 2; ++bh)
      for (int64_t c = 0; c < 64; ++c) {
        p.in.k[(bh * 300 + 77) * 64 + c] = 3 * p.in.q[(bh * 300 + 9) * 64 + c];
        p.in.v[(bh * 300 + 77) * 64 + c] *= 1e-5f;
      }
    const Results got = run(impl(), p);
    const Exact want = exact(p);
    for (size_t h = 0; h < 2; ++h) {
      EXPECT_GT(want.max_logit[h], 10.0);
      EXPECT_NEAR(got.max_logit[h], want.max_logit[h], 0.01 * want.max_logit[h]) << p.describe();
    }
  }
}

SAGE_FOR_ALL_IMPLEMENTATIONS(Values);

}  // namespace
}  // namespace sagebwd::testing
