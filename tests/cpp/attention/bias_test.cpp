// SPDX-License-Identifier: Apache-2.0
// K5: the systematic part of the error. A large batch averages noise away and keeps the projection
// of the error on the true gradient, so it is pooled here over 32 independent problems.
#include <gtest/gtest.h>

#include <cmath>

#include "support/attention_problem.h"
#include "support/compare.h"
#include "support/implementations.h"

namespace sagebwd::testing {
namespace {

using trace::InputKind;

void expect_unbiased(const AttentionProblem& p, double budget) {
  const Exact want = exact(p);
  const Results got = run(fastest(), p);
  const std::pair<const char*, trace::ErrorStats> errors[] = {
      {"O", error_stats(got.o, want.o, p.q_shape())},
      {"dQ", error_stats(got.dq, want.dq, p.q_shape())},
      {"dK", error_stats(got.dk, want.dk, p.k_shape())},
      {"dV", error_stats(got.dv, want.dv, p.k_shape())}};
  for (const auto& [name, error] : errors)
    EXPECT_LE(std::fabs(error.projection), budget)
        << name << ": rel-L2 " << error.rel_l2 << "\n  case: " << p.describe();
}

TEST(Bias, IsSmallOverManyProblems) {
  for (const char* text :
       {"b4 h8 n512 d64 bf16", "b4 h8 n512 d64 bf16 causal", "b4 h8 n256 d64 bf16 rounding=dither"})
    expect_unbiased(make_problem(text), 0.002);
}

TEST(Bias, IsSmallWithAnAttentionSink) {
  for (const char* text : {"b4 h8 n512 d64 bf16", "b4 h8 n512 d64 bf16 causal"})
    expect_unbiased(make_problem(text, InputKind::sink), 0.005);
}

}  // namespace
}  // namespace sagebwd::testing
