// SPDX-License-Identifier: Apache-2.0
// The oracle of the linear branch against its definition, one pair of tokens at a time, and its
// gradients against finite differences.
#include <gtest/gtest.h>

#include <cmath>

#include "linear/linear_problem.h"

namespace sagebwd::testing {
namespace {

using Values = std::vector<double>;

struct Head {
  int64_t nq = 7, nk = 11, d = 8;
  Values q, k, v, dout, dnorm;
  bool mean_free_keys;
  bool empty_row;  // the first block of queries excludes everything

  explicit Head(bool mean_free, bool empty) : mean_free_keys(mean_free), empty_row(empty) {
    Random random(3);
    for (auto [x, n] :
         {std::pair{&q, nq * d}, {&k, nk * d}, {&v, nk * d}, {&dout, nq * d}, {&dnorm, nq}})
      for (int64_t i = 0; i < n; ++i)
        x->push_back(static_cast<double>(random.between(-1.5f, 1.5f)));
  }
  bool excluded(int64_t i, int64_t j) const { return (empty_row && i == 0) || (i + j) % 3 == 0; }
  ref::LinearResult run(bool backward) const {
    return ref::linear_exact(
        {nq, nk, d, q.data(), k.data(), v.data(), backward ? dout.data() : nullptr, dnorm.data(), 3,
         2, [this](int64_t i, int64_t j) { return excluded(i, j); }, mean_free_keys});
  }
  double loss() const {
    const ref::LinearResult r = run(false);
    double sum = 0;
    for (size_t n = 0; n < r.o.size(); ++n) sum += r.o[n] * dout[n];
    for (size_t n = 0; n < r.norm.size(); ++n) sum += r.norm[n] * dnorm[n];
    return sum;
  }
};

Values softmax(Values x) {
  double sum = 0;
  for (double& value : x) sum += value = std::exp(value);
  for (double& value : x) value /= sum;
  return x;
}

TEST(LinearOracle, IsTheSumOverPairs) {
  for (bool mean_free : {false, true}) {
    const Head h(mean_free, true);
    const ref::LinearResult got = h.run(false);
    for (int64_t r = 0; r < h.nq; ++r) {
      const Values phi_q = softmax(Values(&h.q[r * h.d], &h.q[r * h.d] + h.d));
      double n = 0;
      Values o(static_cast<size_t>(h.d), 0.0);
      for (int64_t t = 0; t < h.nk; ++t) {
        if (h.excluded(r / 3, t / 2)) continue;
        Values key(&h.k[t * h.d], &h.k[t * h.d] + h.d);
        for (int64_t c = 0; c < h.d && mean_free; ++c)
          for (int64_t u = 0; u < h.nk; ++u) key[c] -= h.k[u * h.d + c] / static_cast<double>(h.nk);
        const Values phi_k = softmax(key);
        double weight = 0;
        for (int64_t c = 0; c < h.d; ++c) weight += phi_q[c] * phi_k[c];
        n += weight;
        for (int64_t c = 0; c < h.d; ++c) o[c] += weight * h.v[t * h.d + c];
      }
      EXPECT_NEAR(got.norm[r], n, 1e-13);
      for (int64_t c = 0; c < h.d; ++c)
        EXPECT_NEAR(got.o[r * h.d + c], n == 0 ? 0.0 : o[c] / n, 1e-13);
    }
  }
}

TEST(LinearOracle, GradientsAreFiniteDifferences) {
  for (bool mean_free : {false, true})
    for (bool empty : {false, true}) {
      Head h(mean_free, empty);
      const ref::LinearResult r = h.run(true);
      const auto check = [&](const char* name, Values& x, const Values& gradient) {
        ASSERT_EQ(x.size(), gradient.size());
        for (size_t n = 0; n < x.size(); ++n) {
          const double step = 1e-5, kept = x[n];
          x[n] = kept + step;
          const double up = h.loss();
          x[n] = kept - step;
          const double down = h.loss();
          x[n] = kept;
          EXPECT_NEAR(gradient[n], (up - down) / (2 * step), 2e-9) << name << " " << n;
        }
      };
      check("dq", h.q, r.dq);
      check("dk", h.k, r.dk);
      check("dv", h.v, r.dv);
    }
}

}  // namespace
}  // namespace sagebwd::testing
