// SPDX-License-Identifier: Apache-2.0
// The published table over the deviation of Q and K (arXiv 2603.02170, table 1; its shapes are
// not stated).
//
// `vectorwise` must not be worse than the published figures, but for dQ at deviation 1: K is
// rounded twice for it, which makes .0196 in tiles of 64 keys instead of .0184. With key tiles of
// 128 it is .0222, since the per-query scale of dS spans twice the keys. The other three are 15 to
// 25 % better than the published figures at every deviation. `paper` follows the method's text, one
// scale per tile, which cannot give the published .0184 at deviation 1 (docs/results.md); from 3 up
// it must be within 10 % of the published figures.
#include <gtest/gtest.h>

#include <cstdio>
#include <string>
#include <vector>

#include "support/attention_problem.h"
#include "support/compare.h"
#include "support/implementations.h"
#include "trace/published.h"

namespace sagebwd::testing {
namespace {

using trace::kPublished;
using trace::PublishedErrors;

struct Figures {
  double o, dq, dk, dv;
};

Figures measure(const AttentionProblem& p, const Exact& want) {
  const Results got = run(fastest(), p);
  const Figures f{error_stats(got.o, want.o, p.q_shape()).rel_l2,
                  error_stats(got.dq, want.dq, p.q_shape()).rel_l2,
                  error_stats(got.dk, want.dk, p.k_shape()).rel_l2,
                  error_stats(got.dv, want.dv, p.k_shape()).rel_l2};
  std::printf("  %-58s O %.4f dQ %.4f dK %.4f dV %.4f\n", p.describe().c_str(), f.o, f.dq, f.dk,
              f.dv);
  return f;
}

/// One parameter: the row of the published table.
class Sigma : public ::testing::TestWithParam<int> {
 protected:
  const PublishedErrors& row() const { return kPublished[GetParam()]; }
  AttentionProblem problem(const std::string& text) const {
    return make_problem(text, trace::InputKind::gaussian, row().sigma);
  }
};

TEST_P(Sigma, FullTableAt4096) {
  std::printf("sigma %g, published O %.4f dQ %.4f dK %.4f dV %.4f\n", row().sigma, row().o,
              row().dq, row().dk, row().dv);
  const AttentionProblem p = problem("h1 n4096 d64 bf16");
  const Exact want = exact(p);
  const Figures wide = measure(p, want);
  EXPECT_LE(wide.dq, row().sigma == 1 ? 0.023 : row().dq);
  const Figures narrow = measure(problem("h1 n4096 d64 bf16 tile=64x64"), want);
  EXPECT_LE(narrow.dq, row().sigma == 1 ? 0.0205 : row().dq);
  for (const Figures& f : {wide, narrow}) {
    EXPECT_LE(f.o, row().o);
    EXPECT_LE(f.dk, row().dk);
    EXPECT_LE(f.dv, row().dv);
  }
  const Figures paper = measure(problem("h1 n4096 d64 bf16 paper"), want);
  EXPECT_LE(paper.dq, row().sigma == 1 ? 0.065 : 1.1 * row().dq);
  EXPECT_LE(paper.dk, row().sigma == 1 ? 0.065 : 1.1 * row().dk);
  EXPECT_LE(paper.o, 1.3 * row().o);
  EXPECT_LE(paper.dv, row().sigma == 1 ? 0.058 : 1.25 * row().dv);
}

/// A shorter sequence on every implementation, so that none is left out.
TEST_P(Sigma, ShortSequenceOnEveryImplementation) {
  const AttentionProblem p = problem("h1 n768 d64 bf16 tile=64x64");
  // K is rounded twice for dQ: 1.9 to 2.0 % where the table's lowest row has 1.84.
  const double dq = std::max(row().dq, 0.021);
  const Exact want = exact(p);
  for (const dispatch::Implementation* impl : available_production()) {
    const Results got = run(*impl, p);
    EXPECT_TRUE(close("dQ", got.dq, want.dq, p.q_shape(), {.rel_l2 = dq}, p)) << impl->name;
    EXPECT_TRUE(close("dK", got.dk, want.dk, p.k_shape(), {.rel_l2 = row().dk}, p)) << impl->name;
  }
}

INSTANTIATE_TEST_SUITE_P(, Sigma, ::testing::Range(0, 5), [](const auto& row) {
  return "sigma" + std::to_string(static_cast<int>(kPublished[row.param].sigma));
});

}  // namespace
}  // namespace sagebwd::testing
