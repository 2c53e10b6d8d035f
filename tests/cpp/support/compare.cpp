// SPDX-License-Identifier: Apache-2.0
#include "support/compare.h"

#include <algorithm>
#include <cmath>
#include <sstream>

namespace sagebwd::testing {
namespace {

std::string coordinate(size_t index, const Shape& s) {
  const int64_t i = static_cast<int64_t>(index);
  std::ostringstream out;
  out << "[b " << i / (s[3] * s[2] * s[1]) << ", h " << i / (s[3] * s[2]) % s[1] << ", n "
      << i / s[3] % s[2] << ", c " << i % s[3] << "]";
  return out.str();
}

/// Index of the largest error; a NaN is larger than anything.
size_t worst_element(const std::vector<float>& value, const std::vector<double>& reference) {
  size_t worst = 0;
  double largest = -1;
  for (size_t i = 0; i < value.size(); ++i) {
    const double error = std::fabs(static_cast<double>(value[i]) - reference[i]);
    if (std::isnan(error)) return i;
    if (error > largest) largest = error, worst = i;
  }
  return worst;
}

std::string where(const std::vector<float>& value, const std::vector<double>& reference, size_t at,
                  const Shape& shape, const AttentionProblem& p) {
  std::ostringstream s;
  s << "  worst at " << coordinate(at, shape) << ": got " << value[at] << ", expected "
    << reference[at] << "\n  case: " << p.describe();
  return s.str();
}

}  // namespace

double norm(const std::vector<double>& x) {
  double sum = 0;
  for (double v : x) sum += v * v;
  return std::sqrt(sum);
}

std::vector<double> widened(const std::vector<float>& x) { return {x.begin(), x.end()}; }

trace::ErrorStats error_stats(const std::vector<float>& value, const std::vector<double>& reference,
                              const Shape& shape) {
  trace::ErrorStats stats;
  const int64_t cols = shape[3], rows = static_cast<int64_t>(value.size()) / cols;
  for (int64_t r = 0; r < rows; ++r)
    stats.add_row(value.data() + r * cols, reference.data() + r * cols, cols, r);
  stats.finish();
  return stats;
}

::testing::AssertionResult close(const char* name, const std::vector<float>& value,
                                 const std::vector<double>& reference, const Shape& shape,
                                 const Budget& budget, const AttentionProblem& p) {
  if (value.size() != reference.size())
    return ::testing::AssertionFailure()
           << name << ": " << value.size() << " values against " << reference.size();
  if (value.empty()) return ::testing::AssertionSuccess();
  const trace::ErrorStats s = error_stats(value, reference, shape);
  double error = 0;
  for (size_t i = 0; i < value.size(); ++i) error += std::pow(value[i] - reference[i], 2);
  if (std::sqrt(error) <= budget.floor_norm) return ::testing::AssertionSuccess();
  // Written so that a NaN fails.
  if (s.rel_l2 <= budget.rel_l2 && 1 - s.cosine <= budget.one_minus_cosine)
    return ::testing::AssertionSuccess();
  return ::testing::AssertionFailure()
         << name << ": rel-L2 " << s.rel_l2 << " (budget " << budget.rel_l2 << "), 1 - cosine "
         << 1 - s.cosine << " (budget " << budget.one_minus_cosine << "), projection "
         << s.projection << ", worst row " << s.worst_row << " with error " << s.worst_row_error
         << "\n"
         << where(value, reference, worst_element(value, reference), shape, p);
}

::testing::AssertionResult close(const char* name, const std::vector<float>& value,
                                 const std::vector<float>& reference, const Shape& shape,
                                 const Budget& budget, const AttentionProblem& p) {
  return close(name, value, widened(reference), shape, budget, p);
}

::testing::AssertionResult elementwise(const char* name, const std::vector<float>& value,
                                       const std::vector<double>& reference, const Shape& shape,
                                       double absolute, double relative,
                                       const AttentionProblem& p) {
  if (value.size() != reference.size())
    return ::testing::AssertionFailure()
           << name << ": " << value.size() << " values against " << reference.size();
  for (size_t i = 0; i < value.size(); ++i) {
    const double x = static_cast<double>(value[i]), r = reference[i];
    if (std::isnan(r) ? std::isnan(x)
                      : x == r || std::fabs(x - r) <= absolute + relative * std::fabs(r))
      continue;
    return ::testing::AssertionFailure() << name << ": error " << std::fabs(x - r) << " (budget "
                                         << absolute << " + " << relative << " relative)\n"
                                         << where(value, reference, i, shape, p);
  }
  return ::testing::AssertionSuccess();
}

::testing::AssertionResult accurate(const Results& got, const Exact& want, const Budgets& b,
                                    const AttentionProblem& p) {
  const auto budget = [&](double rel_l2) { return Budget{rel_l2, b.one_minus_cosine, 0}; };
  if (auto r = close("O", got.o, want.o, p.o_shape(), budget(b.o), p); !r) return r;
  if (auto r = close("dQ", got.dq, want.dq, p.q_shape(), budget(b.dq), p); !r) return r;
  if (auto r = close("dK", got.dk, want.dk, p.k_shape(), budget(b.dk), p); !r) return r;
  return close("dV", got.dv, want.dv, p.v_shape(), budget(b.dv), p);
}

::testing::AssertionResult agrees(const Results& got, const Results& want, const Parity& parity,
                                  const AttentionProblem& p) {
  // Where the true gradient vanishes (one visible key, say), both hold rounding noise of this size.
  const auto size = [](const std::vector<float>& x) { return norm(widened(x)); };
  const auto root = [](int64_t n) {
    return std::sqrt(static_cast<double>(std::max<int64_t>(n, 1)));
  };
  const double dp =
      size(p.in.dout) / root(p.c.nq * p.c.b * p.c.h) * size(p.in.v) / root(p.c.nk * p.c.b * p.c.hk);
  const double noise = 1e-6 * std::fabs(static_cast<double>(p.resolved().scale)) * dp / root(p.c.d);
  const Budget plain{parity.rel_l2, parity.one_minus_cosine, 0};
  Budget dq = plain, dk = plain;
  // The smallest numbers of f16 are 2^-24 apart.
  const double grain = p.c.dtype == Dtype::f16 ? 0x1p-24 : 0.0;
  dq.floor_norm = noise * size(p.in.k) + grain * root(static_cast<int64_t>(p.in.q.size()));
  dk.floor_norm = noise * size(p.in.q) + grain * root(static_cast<int64_t>(p.in.k.size()));
  const Shape heads{1, 1, p.num_sequences(), p.c.h};
  if (auto r = close("O", got.o, want.o, p.o_shape(), plain, p); !r) return r;
  if (auto r = elementwise("LSE", got.lse, widened(want.lse), p.row_shape(), parity.lse, 1e-6, p);
      !r)
    return r;
  if (auto r = elementwise("max_logit", got.max_logit, widened(want.max_logit), heads, parity.lse,
                           1e-6, p);
      !r)
    return r;
  if (auto r = close("dQ", got.dq, want.dq, p.q_shape(), dq, p); !r) return r;
  if (auto r = close("dK", got.dk, want.dk, p.k_shape(), dk, p); !r) return r;
  return close("dV", got.dv, want.dv, p.v_shape(), plain, p);
}

::testing::AssertionResult differs_less_than_its_error(const Results& got, const Results& want,
                                                       const Exact& truth, double fraction,
                                                       const AttentionProblem& p) {
  const auto check = [&](const char* name, const std::vector<float>& x,
                         const std::vector<float>& reference,
                         const std::vector<double>& exact_value, const Shape& shape) {
    std::vector<double> error(reference.size());
    for (size_t i = 0; i < error.size(); ++i) error[i] = reference[i] - exact_value[i];
    return close(name, x, reference, shape,
                 // What is lifted has the error of FP32 alone.
                 {.rel_l2 = 1e-5, .one_minus_cosine = 1e-9, .floor_norm = fraction * norm(error)},
                 p);
  };
  if (auto r = check("O", got.o, want.o, truth.o, p.o_shape()); !r) return r;
  if (auto r = check("dQ", got.dq, want.dq, truth.dq, p.q_shape()); !r) return r;
  if (auto r = check("dK", got.dk, want.dk, truth.dk, p.k_shape()); !r) return r;
  return check("dV", got.dv, want.dv, truth.dv, p.v_shape());
}

}  // namespace sagebwd::testing
