// SPDX-License-Identifier: Apache-2.0
#include "support/compare.h"

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
  if (auto r = close("O", got.o, want.o, p.q_shape(), budget(b.o), p); !r) return r;
  if (auto r = close("dQ", got.dq, want.dq, p.q_shape(), budget(b.dq), p); !r) return r;
  if (auto r = close("dK", got.dk, want.dk, p.k_shape(), budget(b.dk), p); !r) return r;
  return close("dV", got.dv, want.dv, p.k_shape(), budget(b.dv), p);
}

::testing::AssertionResult agrees(const Results& got, const Results& want, double rel_l2,
                                  double one_minus_cosine, const AttentionProblem& p) {
  // Where the true gradient vanishes (one visible key, say), both hold rounding noise of this size.
  const auto size = [](const std::vector<float>& x) { return norm(widened(x)); };
  const double rows = std::sqrt(static_cast<double>(std::max<int64_t>(p.c.nq * p.c.b * p.c.h, 1)));
  const double d = std::sqrt(static_cast<double>(p.c.d));
  const double scale = std::fabs(static_cast<double>(p.resolved().scale));
  const double dp = size(p.in.dout) / rows * size(p.in.v) /
                    std::sqrt(static_cast<double>(std::max<int64_t>(p.c.nk * p.c.b * p.c.hk, 1)));
  const double noise = 1e-6 * scale * dp / d;
  const Budget b{rel_l2, one_minus_cosine, 0};
  const Budget dq{rel_l2, one_minus_cosine, noise * size(p.in.k)};
  const Budget dk{rel_l2, one_minus_cosine, noise * size(p.in.q)};
  if (auto r = close("O", got.o, want.o, p.q_shape(), b, p); !r) return r;
  if (auto r = elementwise("LSE", got.lse, widened(want.lse), p.row_shape(), 1e-5, 1e-6, p); !r)
    return r;
  if (auto r = elementwise("max_logit", got.max_logit, widened(want.max_logit),
                           {1, 1, p.num_sequences(), p.c.h}, 1e-5, 1e-6, p);
      !r)
    return r;
  if (auto r = close("dQ", got.dq, want.dq, p.q_shape(), dq, p); !r) return r;
  if (auto r = close("dK", got.dk, want.dk, p.k_shape(), dk, p); !r) return r;
  return close("dV", got.dv, want.dv, p.k_shape(), b, p);
}

}  // namespace sagebwd::testing
