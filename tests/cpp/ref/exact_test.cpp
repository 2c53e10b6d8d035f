// SPDX-License-Identifier: Apache-2.0
// The exact oracle against the formulas with everything materialised, and against finite
// differences.
#include <gtest/gtest.h>

#include <algorithm>
#include <limits>

#include "ref/attention_exact.h"
#include "ref/random_head.h"

namespace sagebwd {
namespace {

using ref::ExactResult;
using testing::ExactAnswer;
using testing::RandomHead;

constexpr double kInf = std::numeric_limits<double>::infinity();
constexpr float kNan = std::numeric_limits<float>::quiet_NaN();

std::pair<int64_t, int64_t> range_of(const RandomHead& h, int64_t i) {
  return h.visible ? h.visible(i) : std::pair<int64_t, int64_t>(0, h.nk);
}

/// All matrices in full, one entry at a time.
ExactResult materialised(const RandomHead& h) {
  const size_t scores = static_cast<size_t>(h.nq * h.nk);
  std::vector<double> p(scores, 0.0), ds(scores, 0.0);
  ExactResult r;
  r.o.assign(h.q.size(), 0.0), r.dq = r.o, r.dk.assign(h.k.size(), 0.0), r.dv = r.dk;
  r.max_logit = -kInf;
  const auto dot = [&](const float* a, const float* b) {
    double sum = 0;
    for (int64_t c = 0; c < h.d; ++c) sum += static_cast<double>(a[c]) * static_cast<double>(b[c]);
    return sum;
  };
  for (int64_t i = 0; i < h.nq; ++i) {
    const auto [begin, end] = range_of(h, i);
    double sum = 0;
    for (int64_t j = begin; j < end; ++j) {
      const double s = static_cast<double>(h.scale) * dot(&h.q[i * h.d], &h.k[j * h.d]);
      r.max_logit = std::max(r.max_logit, s);
      sum += p[i * h.nk + j] = std::exp(s);
    }
    r.lse.push_back(std::log(sum));
    for (int64_t j = begin; j < end; ++j) p[i * h.nk + j] /= sum;
    for (int64_t j = begin; j < end; ++j)
      for (int64_t c = 0; c < h.d; ++c)
        r.o[i * h.d + c] += p[i * h.nk + j] * static_cast<double>(h.v[j * h.d + c]);
    double delta = h.dlse.empty() ? 0.0 : -static_cast<double>(h.dlse[i]);
    for (int64_t c = 0; c < h.d; ++c)
      delta += static_cast<double>(h.dout[i * h.d + c]) * r.o[i * h.d + c];
    r.delta.push_back(begin < end ? delta : 0.0);
    for (int64_t j = begin; j < end; ++j)
      ds[i * h.nk + j] = p[i * h.nk + j] * (dot(&h.dout[i * h.d], &h.v[j * h.d]) - delta);
  }
  for (int64_t i = 0; i < h.nq; ++i)
    for (int64_t j = 0; j < h.nk; ++j)
      for (int64_t c = 0; c < h.d; ++c) {
        const double g = static_cast<double>(h.scale) * ds[i * h.nk + j];
        r.dq[i * h.d + c] += g * static_cast<double>(h.k[j * h.d + c]);
        r.dk[j * h.d + c] += g * static_cast<double>(h.q[i * h.d + c]);
        r.dv[j * h.d + c] += p[i * h.nk + j] * static_cast<double>(h.dout[i * h.d + c]);
      }
  return r;
}

void expect_equal(const std::vector<double>& got, const std::vector<double>& want,
                  const char* name) {
  ASSERT_EQ(got.size(), want.size()) << name;
  for (size_t n = 0; n < got.size(); ++n)
    ASSERT_TRUE(got[n] == want[n] || std::fabs(got[n] - want[n]) < 1e-12) << name << " " << n;
}

void expect_matches_formulas(const RandomHead& h) {
  const ExactResult got = ExactAnswer(h).result, want = materialised(h);
  expect_equal(got.o, want.o, "o");
  expect_equal(got.lse, want.lse, "lse");
  expect_equal(got.delta, want.delta, "delta");
  expect_equal(got.dq, want.dq, "dq");
  expect_equal(got.dk, want.dk, "dk");
  expect_equal(got.dv, want.dv, "dv");
  EXPECT_NEAR(got.max_logit, want.max_logit, 1e-12);
}

TEST(ExactOracle, MatchesMaterialisedFormulas) {
  expect_matches_formulas(RandomHead(37, 53, 24));
  expect_matches_formulas(RandomHead(1, 1, 8));
  expect_matches_formulas(RandomHead(5, 300, 64));
}

TEST(ExactOracle, MatchesMaterialisedFormulasUnderMasks) {
  expect_matches_formulas(RandomHead(40, 40, 16).causal());
  expect_matches_formulas(RandomHead(20, 50, 16).causal());
  expect_matches_formulas(RandomHead(50, 20, 16).causal());  // the first 30 rows see nothing
  expect_matches_formulas(RandomHead(60, 60, 16).window(7, 3));
}

TEST(ExactOracle, MatchesMaterialisedFormulasWithLseGradient) {
  RandomHead h = RandomHead(30, 44, 16).causal();
  h.dlse = testing::normal_values(30, 1.0, 99);
  expect_matches_formulas(h);
}

/// loss = <dO, O> + <dLSE, lse>; its derivative by every input, by central differences.
double loss(const RandomHead& h, std::vector<double> q, std::vector<double> k,
            std::vector<double> v) {
  ref::ExactHead e;
  e.nq = h.nq, e.nk = h.nk, e.d = h.d;
  e.q = q.data(), e.k = k.data(), e.v = v.data();
  e.scale = static_cast<double>(h.scale), e.visible = h.visible;
  const ExactResult r = ref::attention_exact(e);
  double sum = 0;
  for (size_t n = 0; n < r.o.size(); ++n) sum += r.o[n] * static_cast<double>(h.dout[n]);
  for (int64_t i = 0; i < h.nq; ++i)
    if (r.lse[i] != -kInf) sum += r.lse[i] * static_cast<double>(h.dlse[i]);
  return sum;
}

void expect_matches_differences(RandomHead h) {
  h.dlse = testing::normal_values(h.nq, 1.0, 5);
  const ExactAnswer a(h);
  constexpr double kStep = 1e-5;
  std::vector<double> x[3] = {a.q, a.k, a.v};
  const std::vector<double>* gradient[3] = {&a.result.dq, &a.result.dk, &a.result.dv};
  for (int t = 0; t < 3; ++t)
    for (size_t n = 0; n < x[t].size(); ++n) {
      const double at = x[t][n];
      x[t][n] = at + kStep;
      const double up = loss(h, x[0], x[1], x[2]);
      x[t][n] = at - kStep;
      const double down = loss(h, x[0], x[1], x[2]);
      x[t][n] = at;
      ASSERT_NEAR((*gradient[t])[n], (up - down) / (2 * kStep), 1e-8) << "qkv"[t] << " " << n;
    }
}

TEST(ExactOracle, MatchesFiniteDifferences) {
  expect_matches_differences(RandomHead(5, 7, 4));
  expect_matches_differences(RandomHead(6, 6, 4).causal());
  expect_matches_differences(RandomHead(7, 4, 4).causal());  // three rows see nothing
  expect_matches_differences(RandomHead(9, 9, 4).window(2, 1));
}

TEST(ExactOracle, RowWithoutKeysIsZero) {
  RandomHead h = RandomHead(4, 2, 8).causal();
  h.dlse = {1, 2, 3, 4};
  for (int64_t c = 0; c < 8; ++c)
    h.dout[c] = h.q[c] = kNan;  // row 0 sees nothing, so this must not matter
  const ExactResult r = ExactAnswer(h).result;
  for (int64_t i : {0, 1}) {
    EXPECT_EQ(r.lse[i], -kInf);
    for (int64_t c = 0; c < 8; ++c) {
      EXPECT_EQ(r.o[i * 8 + c], 0.0);
      EXPECT_EQ(r.dq[i * 8 + c], 0.0);
    }
  }
  for (double x : r.dk) EXPECT_TRUE(std::isfinite(x));
  for (double x : r.dv) EXPECT_TRUE(std::isfinite(x));
}

TEST(ExactOracle, NoKeysAtAll) {
  const ExactResult r = ExactAnswer(RandomHead(3, 0, 8)).result;
  EXPECT_EQ(r.max_logit, -kInf);
  EXPECT_EQ(r.lse, std::vector<double>(3, -kInf));
  EXPECT_EQ(r.o, std::vector<double>(24, 0.0));
  EXPECT_EQ(r.dq, std::vector<double>(24, 0.0));
}

/// Softmax subtracts the largest logit first: logits in the thousands are as good as small ones.
TEST(ExactOracle, LargeLogitsDoNotOverflow) {
  RandomHead h(8, 16, 8, 60.0);
  const ExactResult r = ExactAnswer(h).result;
  EXPECT_GT(r.max_logit, 5000.0);
  for (double x : r.o) EXPECT_TRUE(std::isfinite(x));
  for (double x : r.dq) EXPECT_TRUE(std::isfinite(x));
}

/// Which rows of a [n, d] tensor hold a NaN.
std::vector<int64_t> nan_rows(const std::vector<double>& x, int64_t d) {
  std::vector<int64_t> rows;
  for (int64_t i = 0; i < static_cast<int64_t>(x.size()) / d; ++i)
    if (std::any_of(&x[i * d], &x[i * d] + d, [](double y) { return std::isnan(y); }))
      rows.push_back(i);
  return rows;
}

TEST(ExactOracle, NanReachesWhatItInfluences) {
  using Rows = std::vector<int64_t>;
  RandomHead h = RandomHead(6, 6, 4).window(1, 0);  // query i sees keys i - 1 and i
  h.k[3 * 4 + 2] = kNan;  // seen by queries 3 and 4, which see keys 2, 3 and 4
  ExactResult r = ExactAnswer(h).result;
  EXPECT_EQ(nan_rows(r.o, 4), (Rows{3, 4}));
  EXPECT_EQ(nan_rows(r.lse, 1), (Rows{3, 4}));
  EXPECT_EQ(nan_rows(r.dq, 4), (Rows{3, 4}));
  EXPECT_EQ(nan_rows(r.dk, 4), (Rows{2, 3, 4}));
  EXPECT_EQ(nan_rows(r.dv, 4), (Rows{2, 3, 4}));
  EXPECT_TRUE(std::isnan(r.max_logit));

  h = RandomHead(6, 6, 4).window(1, 0);
  h.v[3 * 4 + 2] = kNan;
  r = ExactAnswer(h).result;
  EXPECT_EQ(nan_rows(r.o, 4), (Rows{3, 4}));
  EXPECT_FALSE(std::isnan(r.o[3 * 4 + 1])) << "other channels of O do not see it";
  EXPECT_EQ(nan_rows(r.lse, 1), Rows{});
  EXPECT_EQ(nan_rows(r.dk, 4), (Rows{2, 3, 4}));
  EXPECT_EQ(nan_rows(r.dv, 4), Rows{}) << "dV = PᵀdO does not know V";
}

TEST(ExactOracle, TapAndTilesShowTheSameScores) {
  const RandomHead h = RandomHead(33, 21, 12).causal();
  std::vector<double> s(33 * 21), p(s), dp(s), ds(s);
  int64_t rows = 0;
  const ExactAnswer a(h, [&](const ref::ExactRow& row) {
    EXPECT_EQ(std::pair(row.begin, row.end), range_of(h, row.i));
    for (int64_t j = row.begin; j < row.end; ++j) {
      const int64_t at = row.i * 21 + j;
      s[at] = row.s[j - row.begin], p[at] = row.p[j - row.begin];
      dp[at] = row.dp[j - row.begin], ds[at] = row.ds[j - row.begin];
    }
    ++rows;
  });
  EXPECT_EQ(rows, 21) << "twelve rows see nothing";
  const ref::ExactTile t = ref::exact_tile(a.head, a.result, 15, 10, 2, 7);
  int64_t compared = 0;
  for (int64_t r = 0; r < 10; ++r)
    for (int64_t c = 0; c < 7; ++c) {
      const auto [begin, end] = range_of(h, 15 + r);
      if (2 + c < begin || 2 + c >= end) continue;
      const int64_t at = (15 + r) * 21 + 2 + c;
      EXPECT_NEAR(t.s[r * 7 + c], s[at], 1e-14);
      EXPECT_NEAR(t.p[r * 7 + c], p[at], 1e-14);
      EXPECT_NEAR(t.dp[r * 7 + c], dp[at], 1e-13);
      EXPECT_NEAR(t.ds[r * 7 + c], ds[at], 1e-13);
      ++compared;
    }
  EXPECT_GT(compared, 20);
  for (int64_t i = 12; i < 33; ++i) {
    double sum = 0, grad = 0;
    for (int64_t j = 0; j < 21; ++j) sum += p[i * 21 + j], grad += ds[i * 21 + j];
    EXPECT_NEAR(sum, 1.0, 1e-14);
    EXPECT_NEAR(grad, 0.0, 1e-13);
  }
}

}  // namespace
}  // namespace sagebwd
