// SPDX-License-Identifier: Apache-2.0
// The switches of a recipe, each with the effect it is there for: smoothing of K and Q, lifted
// matmuls, leading tiles of P·V in floating point, and rounding.
#include <gtest/gtest.h>

#include <string>
#include <vector>

#include "support/attention_problem.h"
#include "support/compare.h"
#include "support/implementations.h"

namespace sagebwd::testing {
namespace {

using trace::InputKind;

struct Errors {
  double o, dq, dk, dv;
};

Errors errors_of(const dispatch::Implementation& impl, const AttentionProblem& p,
                 const Exact& want) {
  const Results got = run(impl, p);
  return {error_stats(got.o, want.o, p.q_shape()).rel_l2,
          error_stats(got.dq, want.dq, p.q_shape()).rel_l2,
          error_stats(got.dk, want.dk, p.k_shape()).rel_l2,
          error_stats(got.dv, want.dv, p.k_shape()).rel_l2};
}
Errors errors_of(const dispatch::Implementation& impl, const AttentionProblem& p) {
  return errors_of(impl, p, exact(p));
}

/// Adds ±offset to every second channel.
void shift(std::vector<float>& x, float offset) {
  for (size_t i = 0; i < x.size(); ++i) x[i] += i % 2 == 0 ? offset : -offset;
}

class Switches : public PerImplementation {};

TEST_P(Switches, SmoothingOfKeys) {
  for (const char* recipe : {"", "paper "}) {
    const std::string text = std::string("h2 n300 d64 f32 ") + recipe;
    const Errors on = errors_of(impl(), make_problem(text, InputKind::offset));
    const Errors off = errors_of(impl(), make_problem(text + "smooth_k=off", InputKind::offset));
    EXPECT_LT(on.dq, 0.08);
    EXPECT_GT(off.dq, 3 * on.dq);
    EXPECT_GT(off.o, 2 * on.o);
  }
}

/// Whatever the mean key, the error of dQ is that of smoothed keys.
TEST_P(Switches, KeyOffsetsDoNotMatter) {
  std::vector<double> dq;
  for (float offset : {0.0f, 1.0f, 4.0f, 10.0f}) {
    AttentionProblem p = make_problem("h2 n300 d64 f32");
    shift(p.in.k, offset);
    dq.push_back(errors_of(impl(), p).dq);
    EXPECT_NEAR(dq.back(), dq.front(), 0.05 * dq.front()) << offset;
  }
}

TEST_P(Switches, SmoothingOfQueries) {
  AttentionProblem p = make_problem("h2 n300 d64 f32 paper");
  shift(p.in.q, 5.0f);
  const Exact want = exact(p);
  const Errors off = errors_of(impl(), p, want);
  p.c.recipe.smooth_q = true;
  const Errors on = errors_of(impl(), p, want);
  EXPECT_LT(on.o, 0.8 * off.o);
  EXPECT_LT(on.dk, 0.8 * off.dk);
  // Exact: lifted, the switch changes nothing.
  p.c.recipe.high_precision = kMatmulAll;
  EXPECT_LT(errors_of(impl(), p, want).dk, 2e-5);
}

/// Every matmul lifted: FP32 all the way.
TEST_P(Switches, AllLiftedIsExact) {
  for (const char* text : {"h2 n300 d64 f32", "h2 nq150 nk300 d40 f32 causal paper",
                           "h4 hk2 n200 d128 f32 paper smooth_q=on"}) {
    AttentionProblem p = make_problem(text);
    p.c.recipe.high_precision = kMatmulAll;
    EXPECT_TRUE(
        accurate(run(impl(), p), exact(p), {.o = 1e-5, .dq = 1e-5, .dk = 1e-5, .dv = 1e-5}, p));
  }
}

/// One matmul in INT8 and the rest lifted: the error appears where that matmul ends, and lifting it
/// takes the error away.
TEST_P(Switches, EachLiftRemovesItsOwnError) {
  struct Case {
    uint32_t matmul;
    double Errors::*where;
    double least;
  };
  const Case cases[] = {{kMatmulS, &Errors::o, 3e-3},           {kMatmulO, &Errors::o, 1e-3},
                        {kMatmulSRecompute, &Errors::dq, 3e-3}, {kMatmulDV, &Errors::dv, 3e-3},
                        {kMatmulDQ, &Errors::dq, 3e-3},         {kMatmulDK, &Errors::dk, 3e-3}};
  for (const char* recipe : {"", "paper "}) {
    AttentionProblem p = make_problem(std::string("h2 n300 d64 f32 causal ") + recipe);
    const Exact want = exact(p);
    p.c.recipe.high_precision = kMatmulAll;
    const Errors lifted = errors_of(impl(), p, want);
    for (const Case& c : cases) {
      p.c.recipe.high_precision = kMatmulAll & ~c.matmul;
      const Errors alone = errors_of(impl(), p, want);
      EXPECT_GT(alone.*c.where, c.least) << matmul_name(c.matmul) << " " << recipe;
      EXPECT_LT(lifted.*c.where, 1e-5) << matmul_name(c.matmul) << " " << recipe;
    }
  }
}

/// An attention sink costs its tile the codes of the other keys in `paper`, as long as P is
/// quantised. `vectorwise` folds the small value of the sink into P.
TEST_P(Switches, SinksOfPaperNeedPInFloatingPoint) {
  AttentionProblem p = make_problem("h2 n512 d64 bf16 paper", InputKind::sink);
  const Exact want = exact(p);
  const Errors none = errors_of(impl(), p, want);
  p.c.recipe.high_precision = kMatmulO;
  const Errors lifted = errors_of(impl(), p, want);
  EXPECT_LT(lifted.o, 0.15 * none.o);
  EXPECT_GT(none.dq, 1.3 * lifted.dq);

  p.c.recipe = Recipe::vectorwise();
  const Errors folded = errors_of(impl(), p, want);
  // .025 with 255 levels of P, .042 with 127.
  const bool fine = impl().tiles(p.resolved()).p_levels == 255;
  EXPECT_LE(folded.dq, fine ? 0.035 : 0.045);
  EXPECT_LE(folded.dk, fine ? 0.035 : 0.045);
}

/// Outlier channels of Q and K without a mean, which smoothing cannot remove.
TEST_P(Switches, Rotation) {
  for (const char* recipe : {"", "paper "}) {
    AttentionProblem p = make_problem(std::string("h2 n300 d64 f32 causal ") + recipe);
    for (size_t i = 0; i < p.in.q.size(); ++i) {
      if (i % 64 == 7) p.in.k[i] *= 12.0f;  // 12/9 of an ordinary channel's part of the logits
      if (i % 64 == 7) p.in.q[i] /= 9.0f;
      if (i % 64 == 40) p.in.q[i] *= 12.0f, p.in.k[i] /= 9.0f;
    }
    const Exact want = exact(p);
    p.c.recipe.rotate = true;
    const Errors on = errors_of(impl(), p, want);
    p.c.recipe.rotate = false;
    const Errors off = errors_of(impl(), p, want);
    EXPECT_GT(off.o, 2 * on.o) << recipe;
    EXPECT_GT(off.dk, 1.5 * on.dk) << recipe;
    // Exact: lifted, the switch changes nothing.
    p.c.recipe.rotate = true;
    p.c.recipe.high_precision = kMatmulAll;
    EXPECT_LT(errors_of(impl(), p, want).dk, 2e-5);
  }
}

/// Dither of one operand leaves the others as they are.
TEST_P(Switches, DitherOfOneOperand) {
  for (const char* recipe : {"", " paper"}) {
    const std::string text = std::string("h2 nq200 nk300 d64 f32 causal") + recipe;
    const Results nearest = run(impl(), make_problem(text));
    const Results dq = run(impl(), make_problem(text + " rounding=dither:dQ"));
    EXPECT_EQ(dq.o, nearest.o);
    EXPECT_EQ(dq.dk, nearest.dk);
    EXPECT_EQ(dq.dv, nearest.dv);
    EXPECT_NE(dq.dq, nearest.dq);
    const Results all = run(impl(), make_problem(text + " rounding=dither"));
    EXPECT_NE(all.dk, nearest.dk);
    EXPECT_NE(all.dv, nearest.dv);
    const Results others = run(impl(), make_problem(text + " rounding=dither:dK,dV"));
    EXPECT_EQ(others.o, nearest.o);
    EXPECT_EQ(others.dq, nearest.dq);
    EXPECT_NE(others.dk, nearest.dk);
    EXPECT_EQ(others.dv, all.dv);
    const Results p = run(impl(), make_problem(text + " rounding=dither:O"));
    EXPECT_EQ(p.o, all.o);
    EXPECT_NE(p.o, nearest.o);
    EXPECT_EQ(p.lse, nearest.lse);
  }
}

/// One key is much longer than its neighbours, though nobody looks at it: with a scale of its own
/// it does not spoil theirs.
TEST_P(Switches, KeyScalesPerToken) {
  AttentionProblem p = make_problem("n300 d64 f32");
  for (int64_t i = 0; i < 300; ++i) p.in.q[i * 64] += 4.0f;
  for (int64_t c = 0; c < 64; ++c) p.in.k[200 * 64 + c] = c == 0 ? -200.0f : 0.0f;
  const Exact want = exact(p);
  const Errors token = errors_of(impl(), p, want);
  p.c.recipe = Recipe::paper();
  const Errors block = errors_of(impl(), p, want);
  EXPECT_GT(block.o, 1.5 * token.o);
  EXPECT_GT(block.dk, 1.2 * token.dk);
}

/// dO with rows of very different size: scales are per token, so small rows keep their gradient.
TEST_P(Switches, RowsOfVeryDifferentSize) {
  AttentionProblem p = make_problem("h2 n300 d64 f32");
  for (int64_t row = 0; row < 600; ++row)
    for (int64_t c = 0; c < 64; ++c) p.in.dout[row * 64 + c] *= row % 3 == 0 ? 1e-4f : 1.0f;
  const Exact want = exact(p);
  const trace::ErrorStats dq = error_stats(run(impl(), p).dq, want.dq, p.q_shape());
  EXPECT_LT(dq.worst_row_error, 0.15) << "row " << dq.worst_row;
}

SAGE_FOR_ALL_IMPLEMENTATIONS(Switches);

}  // namespace
}  // namespace sagebwd::testing
