// SPDX-License-Identifier: Apache-2.0
// Lengths around every tile boundary, queries and keys of different number, batches and heads.
#include <gtest/gtest.h>

#include <cmath>
#include <string>
#include <vector>

#include "support/attention_problem.h"
#include "support/compare.h"
#include "support/implementations.h"

namespace sagebwd::testing {
namespace {

constexpr Budgets kBudgets{.o = 0.03, .dq = 0.03, .dk = 0.04, .dv = 0.03, .one_minus_cosine = 1e-3};

bool all_finite(const Results& r) {
  for (const auto* x : {&r.o, &r.dq, &r.dk, &r.dv})
    for (float v : *x)
      if (!std::isfinite(v)) return false;
  return true;
}

/// The budgets hold from 64 visible keys up. With fewer, the errors of a few rows do not average,
/// and with a single key Q and K have no gradient at all. Those results are compared with the
/// recipe oracle instead.
void check(const dispatch::Implementation& impl, const AttentionProblem& p) {
  const Results got = run(impl, p);
  EXPECT_TRUE(all_finite(got)) << impl.name << " " << p.describe();
  if (std::min(p.c.nq, p.c.nk) >= 64) {
    EXPECT_TRUE(accurate(got, exact(p), kBudgets, p)) << impl.name;
  } else {
    EXPECT_TRUE(agrees(got, run(reference(), with_levels_of(impl, p)), {2e-3, 1e-5}, p))
        << impl.name;
  }
}

class Lengths : public PerImplementation {};

TEST_P(Lengths, SquareFullAndCausal) {
  for (int n : {1, 2, 3, 15, 16, 17, 63, 64, 65, 97, 113, 127, 128, 129, 203, 257})
    for (const char* mask : {"full", "causal"})
      check(impl(), make_problem("h1 n" + std::to_string(n) + " d64 bf16 " + mask));
}

TEST_P(Lengths, QueriesAndKeysOfDifferentNumber) {
  for (const char* size : {"nq1 nk239", "nq3 nk799", "nq113 nk203", "nq203 nk113", "nq127 nk513",
                           "nq256 nk64", "nq65 nk64", "nq64 nk129", "nq129 nk127", "nq17 nk16"})
    for (const char* rest : {"b1 h3 hk1", "b3 h1"})
      check(impl(), make_problem(std::string(rest) + " d64 f32 " + size));
}

SAGE_FOR_PRODUCTION_IMPLEMENTATIONS(Lengths);

class LongLengths : public ::testing::TestWithParam<const char*> {};

TEST_P(LongLengths, OnTheFastestImplementation) { check(fastest(), make_problem(GetParam())); }

INSTANTIATE_TEST_SUITE_P(, LongLengths,
                         ::testing::Values("h1 n799 d64 causal bf16", "h1 n1023 d64 bf16",
                                           "h1 n1025 d128 causal bf16", "h1 nq1024 nk1023 d64 bf16",
                                           "h1 n4097 d64 causal bf16"));

}  // namespace
}  // namespace sagebwd::testing
