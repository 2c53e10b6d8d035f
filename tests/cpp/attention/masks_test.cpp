// SPDX-License-Identifier: Apache-2.0
// Causal masks with both alignments, sliding windows, more keys than queries and fewer. The mask of
// each case is written out pair by pair here; keys outside it may hold anything.
#include <gtest/gtest.h>

#include <string>
#include <vector>

#include "support/attention_problem.h"
#include "support/compare.h"
#include "support/implementations.h"

namespace sagebwd::testing {
namespace {

/// The definition in sagebwd/attention.h, for one pair.
bool sees(const spec::AttnCase& c, int64_t i, int64_t j) {
  const int64_t shift = c.mask.align == Align::bottom_right ? c.nk - c.nq : 0;
  const int64_t offset = j - (i + shift);
  if (c.mask.causal && offset > 0) return false;
  if (c.mask.window_right >= 0 && offset > c.mask.window_right) return false;
  return c.mask.window_left < 0 || -offset <= c.mask.window_left;
}

const std::vector<std::string> kSizes = {"n300",      "nq150 nk333", "nq333 nk150",
                                         "nq1 nk200", "nq200 nk1",   "nq129 nk128"};
const std::vector<std::string> kMasks = {"full",         "causal",
                                         "window=40,-1", "window=-1,25",
                                         "window=30,10", "causal window=64,-1",
                                         "window=0,0",   "causal window=0,-1"};

class Masks : public PerImplementation {
 protected:
  template <typename F>
  void for_all(const std::string& rest, F f) {
    for (const std::string& size : kSizes)
      for (const std::string& mask : kMasks)
        for (const char* align : {"align=bottom_right", "align=top_left"})
          f(make_problem(size + " " + mask + " " + align + " " + rest));
  }
};

TEST_P(Masks, LibraryAndDefinitionAgreePairByPair) {
  for_all("h1 d8", [](const AttentionProblem& p) {
    const spec::Problem r = p.resolved();
    for (int64_t i = 0; i < p.c.nq; ++i) {
      const spec::KeyRange range = r.visible(r.sequence(0), i);
      for (int64_t j = 0; j < p.c.nk; ++j)
        ASSERT_EQ(range.begin <= j && j < range.end, sees(p.c, i, j))
            << "query " << i << " key " << j << " " << p.describe();
    }
  });
}

/// All matmuls lifted, so that what is left is the mask: O and gradients equal FP64.
TEST_P(Masks, ExactWhenLifted) {
  for_all("h2 hk1 d16 f32 lift=S,O,S',dV,dP,dQ,dK", [&](const AttentionProblem& p) {
    const Results got = run(impl(), p);
    const Exact want = exact(p);
    const auto near = [&](const char* name, const std::vector<float>& x,
                          const std::vector<double>& r, const Shape& s) {
      return close(name, x, r, s, {.rel_l2 = 1e-5, .floor_norm = 1e-4}, p);
    };
    EXPECT_TRUE(near("O", got.o, want.o, p.q_shape()));
    EXPECT_TRUE(elementwise("LSE", got.lse, want.lse, p.row_shape(), 1e-5, 1e-6, p));
    EXPECT_TRUE(near("dQ", got.dq, want.dq, p.q_shape()));
    EXPECT_TRUE(near("dK", got.dk, want.dk, p.k_shape()));
    EXPECT_TRUE(near("dV", got.dv, want.dv, p.k_shape()));
  });
}

/// In INT8: the budgets of the recipe, where rows have enough keys to average over.
TEST_P(Masks, AccurateInInt8) {
  for (const char* text :
       {"h2 n300 d64 bf16 causal", "h2 nq150 nk333 d64 bf16 causal",
        "h2 nq333 nk150 d64 bf16 causal", "h2 nq333 nk150 d64 bf16 causal align=top_left",
        "h2 nq150 nk333 d64 bf16 causal align=top_left", "h2 n300 d64 bf16 window=60,-1",
        "h2 n300 d64 bf16 window=60,30", "h2 n300 d64 bf16 causal window=100,-1"}) {
    const AttentionProblem p = make_problem(text);
    EXPECT_TRUE(
        accurate(run(impl(), p), exact(p), {.o = 0.03, .dq = 0.03, .dk = 0.04, .dv = 0.03}, p));
  }
}

/// The content of a hidden key changes no bit of O (causality_test.cpp has more of that). In
/// `paper` it changes a causal row through the shared mean and scales, which is within rounding.
TEST_P(Masks, TheFutureDoesNotLeak) {
  for (const char* text : {"n300 d32 f32 causal", "n300 d32 f32 causal paper",
                           "n300 d32 f32 causal smooth_k=off rotate=off"}) {
    const AttentionProblem p = make_problem(text);
    AttentionProblem q = p;
    const int64_t cut = 137 * p.c.d;
    for (size_t i = static_cast<size_t>(cut); i < p.in.k.size(); ++i)
      q.in.k[i] = -2 * p.in.k[i], q.in.v[i] = 3 * p.in.v[i];
    const Results a = run(impl(), p), b = run(impl(), q);
    const auto past = [&](const std::vector<float>& x) {
      return std::vector<float>(x.begin(), x.begin() + cut);
    };
    if (p.c.recipe.scheme == Scheme::vectorwise) {
      EXPECT_EQ(past(b.o), past(a.o)) << p.describe();
    }
    EXPECT_TRUE(close("O", past(b.o), past(a.o), {1, 1, 137, 32}, {.rel_l2 = 0.08}, p));
    EXPECT_TRUE(close("dQ", past(b.dq), past(a.dq), {1, 1, 137, 32}, {.rel_l2 = 0.08}, p));
  }
}

SAGE_FOR_ALL_IMPLEMENTATIONS(Masks);

}  // namespace
}  // namespace sagebwd::testing
