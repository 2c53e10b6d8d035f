// SPDX-License-Identifier: Apache-2.0
// Rounding by dither, seen from outside. It replays bit for bit from its seed. The mean of 64 draws
// is nearer to the gradient without rounding than nearest rounding is. (The tests of the tile
// kernel check that a single code is unbiased and has the right variance.)
#include <gtest/gtest.h>

#include <vector>

#include "support/attention_problem.h"
#include "support/compare.h"
#include "support/implementations.h"

namespace sagebwd::testing {
namespace {

AttentionProblem with_seed(AttentionProblem p, uint64_t seed) {
  p.c.recipe.rounding = Rounding::dither;
  p.c.recipe.seed = seed;
  return p;
}

class DitheredAttention : public PerImplementation {};

TEST_P(DitheredAttention, ReplaysFromItsSeed) {
  const AttentionProblem p = make_problem("b2 h2 nq200 nk300 d64 f32 causal");
  const Results a = run(impl(), with_seed(p, 1)), b = run(impl(), with_seed(p, 1));
  EXPECT_EQ(first_difference(a, b), "");
  const Results other = run(impl(), with_seed(p, 2));
  EXPECT_NE(a.o, other.o);
  EXPECT_NE(a.dq, other.dq);
  EXPECT_NE(a.dk, other.dk);
  EXPECT_NE(a.dv, other.dv);
  EXPECT_EQ(a.lse, other.lse);  // Q and K are always rounded to nearest
}

/// Heads with equal inputs draw different offsets, or their errors would add up.
TEST_P(DitheredAttention, HeadsAndBatchesDrawTheirOwn) {
  AttentionProblem p = make_problem("b2 h2 n200 d32 f32");
  for (auto* x : {&p.in.q, &p.in.k, &p.in.v, &p.in.dout}) {
    const size_t head = x->size() / 4;
    for (size_t i = head; i < x->size(); ++i) (*x)[i] = (*x)[i % head];
  }
  const Results nearest = run(impl(), p), dithered = run(impl(), with_seed(p, 3));
  const size_t head = nearest.dq.size() / 4;
  const auto same = [&](const std::vector<float>& x, size_t a, size_t b) {
    return std::equal(x.begin() + a * head, x.begin() + (a + 1) * head, x.begin() + b * head);
  };
  for (size_t a = 0; a < 4; ++a)
    for (size_t b = 0; b < a; ++b) {
      EXPECT_TRUE(same(nearest.dq, a, b));
      for (const auto* x : {&dithered.o, &dithered.dq, &dithered.dk, &dithered.dv})
        EXPECT_FALSE(same(*x, a, b)) << "heads " << a << " and " << b;
    }
}

TEST_P(DitheredAttention, MeanOfManyDrawsBeatsNearest) {
  for (const char* recipe : {"vectorwise", "paper"}) {
    // Everything that is not rounded by dither is lifted, so that its error does not count.
    AttentionProblem p = make_problem(std::string("n256 d64 f32 lift=S,S' ") + recipe);
    p.levels_of_p = 127;
    const Exact want = exact(p);
    const Results nearest = run(impl(), p);
    constexpr int kDraws = 64;
    std::vector<double> dq(nearest.dq.size()), dk(nearest.dk.size()), dv(nearest.dv.size());
    for (int draw = 0; draw < kDraws; ++draw) {
      const Results r = run(impl(), with_seed(p, static_cast<uint64_t>(draw)));
      for (size_t i = 0; i < dq.size(); ++i) dq[i] += r.dq[i] / kDraws;
      for (size_t i = 0; i < dk.size(); ++i) dk[i] += r.dk[i] / kDraws, dv[i] += r.dv[i] / kDraws;
    }
    const auto error = [&](const std::vector<double>& mean,
                           const std::vector<double>& exact_value) {
      return error_stats({mean.begin(), mean.end()}, exact_value, p.q_shape()).rel_l2;
    };
    EXPECT_LT(error(dq, want.dq), 0.7 * error(widened(nearest.dq), want.dq)) << recipe;
    EXPECT_LT(error(dk, want.dk), 0.7 * error(widened(nearest.dk), want.dk)) << recipe;
    EXPECT_LT(error(dv, want.dv), 0.7 * error(widened(nearest.dv), want.dv)) << recipe;
  }
}

SAGE_FOR_PRODUCTION_IMPLEMENTATIONS(DitheredAttention);

}  // namespace
}  // namespace sagebwd::testing
