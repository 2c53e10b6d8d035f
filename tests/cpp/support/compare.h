// SPDX-License-Identifier: Apache-2.0
// Comparison of a tensor with its reference. A failure says which metric broke which budget, where
// the largest error sits with both values, and the case string.
#pragma once

#include <gtest/gtest.h>

#include <limits>
#include <string>
#include <vector>

#include "support/attention_problem.h"
#include "trace/metrics.h"

namespace sagebwd::testing {

struct Budget {
  double rel_l2 = std::numeric_limits<double>::infinity();
  double one_minus_cosine = std::numeric_limits<double>::infinity();
  /// An error below this norm is accepted whatever the reference is: where the reference cancels to
  /// zero, rounding noise is left.
  double floor_norm = 0;
};

/// Error figures over rows of the tensor.
trace::ErrorStats error_stats(const std::vector<float>& value, const std::vector<double>& reference,
                              const Shape& shape);

::testing::AssertionResult close(const char* name, const std::vector<float>& value,
                                 const std::vector<double>& reference, const Shape& shape,
                                 const Budget& budget, const AttentionProblem& p);
::testing::AssertionResult close(const char* name, const std::vector<float>& value,
                                 const std::vector<float>& reference, const Shape& shape,
                                 const Budget& budget, const AttentionProblem& p);

/// Every element within `absolute` + `relative`·|reference|; infinities and NaNs must match.
::testing::AssertionResult elementwise(const char* name, const std::vector<float>& value,
                                       const std::vector<double>& reference, const Shape& shape,
                                       double absolute, double relative, const AttentionProblem& p);

/// Budgets of the four outputs.
struct Budgets {
  double o, dq, dk, dv;
  double one_minus_cosine = std::numeric_limits<double>::infinity();
};

/// O, dQ, dK and dV against the exact answer.
::testing::AssertionResult accurate(const Results& got, const Exact& want, const Budgets& budgets,
                                    const AttentionProblem& p);

/// Tolerances between two implementations of one recipe.
struct Parity {
  double rel_l2, one_minus_cosine;
  double lse = 1e-5;  // absolute, beside 1e-6 relative; of max_logit too
};

::testing::AssertionResult agrees(const Results& got, const Results& want, const Parity& parity,
                                  const AttentionProblem& p);

/// O and gradients differ by less than `fraction` of the reference's own distance from the truth.
::testing::AssertionResult differs_less_than_its_error(const Results& got, const Results& want,
                                                       const Exact& truth, double fraction,
                                                       const AttentionProblem& p);

double norm(const std::vector<double>& x);
std::vector<double> widened(const std::vector<float>& x);

}  // namespace sagebwd::testing
