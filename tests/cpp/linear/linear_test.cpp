// SPDX-License-Identifier: Apache-2.0
// The linear branch of every implementation that has one, against the FP64 oracle.
#include <gtest/gtest.h>

#include "linear/linear_problem.h"
#include "support/implementations.h"
#include "support/pool.h"

namespace sagebwd::testing {
namespace {

double error(const std::vector<double>& got, const std::vector<double>& want) {
  double difference = 0, size = 0;
  for (size_t n = 0; n < want.size(); ++n) {
    difference += (got[n] - want[n]) * (got[n] - want[n]);
    size += want[n] * want[n];
  }
  if (std::isnan(difference)) return difference;
  return difference == 0 ? 0 : std::sqrt(difference / size);
}

class Linear : public PerImplementation {
 protected:
  void SetUp() override {
    PerImplementation::SetUp();
    if (!IsSkipped() && branch() == nullptr) GTEST_SKIP() << "has no linear branch";
  }
  /// That of the implementation; null if it has none.
  const dispatch::Sla2* branch() const {
    for (const dispatch::Sla2* found : dispatch::sla2_implementations())
      if (GetParam() == found->name) return found;
    return nullptr;
  }
  LinearAnswer run(LinearProblem& problem, const ParallelFor& pf = {}) const {
    LinearForwardArgs f = problem.forward_args();
    const spec::LinearProblem fp = spec::resolve(f, true);
    f.parallel_for = pf;
    problem.give_workspace(f, branch()->workspace(fp) + 64);
    branch()->forward(fp, f, aligned(f.workspace));
    LinearBackwardArgs b = problem.backward_args();
    const spec::LinearProblem bp = spec::resolve(b, true);
    b.parallel_for = pf;
    problem.give_workspace(b, branch()->workspace(bp) + 64);
    branch()->backward(bp, b, aligned(b.workspace));
    return problem.results();
  }
  static void* aligned(void* at) {
    return reinterpret_cast<void*>((reinterpret_cast<uintptr_t>(at) + 63) / 64 * 64);
  }
  void expect_accurate(LinearProblem& problem, double limit, double gradient_limit) const {
    const LinearAnswer got = run(problem), want = problem.exact();
    EXPECT_LE(error(got.o, want.o), limit) << "o, " << problem.s.text();
    EXPECT_LE(error(got.norm, want.norm), 2e-6) << "norm, " << problem.s.text();
    EXPECT_LE(error(got.dq, want.dq), gradient_limit) << "dq, " << problem.s.text();
    EXPECT_LE(error(got.dk, want.dk), gradient_limit) << "dk, " << problem.s.text();
    EXPECT_LE(error(got.dv, want.dv), gradient_limit) << "dv, " << problem.s.text();
  }
};
SAGE_FOR_ALL_IMPLEMENTATIONS(Linear);

TEST_P(Linear, IsAccurateForAnyShare) {
  for (double share : {0.0, 0.03, 0.1, 0.4, 0.6, 0.9})
    for (bool mean_free : {true, false}) {
      LinearProblem problem(
          {.nq = 300, .nk = 1000, .share = share, .mean_free_keys = mean_free, .spread = 2.0f});
      expect_accurate(problem, 1e-6, 5e-6);
    }
}

/// Every channel keeps its accuracy where it is large in excluded blocks only and another channel
/// is large everywhere.
TEST_P(Linear, LargeExcludedValuesLeaveNothingBehind) {
  for (float large : {1e4f, 1e8f, 1e12f, 1e16f, 1e30f}) {
    LinearProblem problem({.h = 1, .nq = 128, .nk = 512, .d = 16, .share = 0.2});
    problem.count.assign(problem.count.size(), 1);
    for (size_t row = 0; row < problem.count.size(); ++row)
      problem.index[row * (problem.index.size() / problem.count.size())] = 0;
    problem.v.for_each([&](int64_t at, int64_t, int64_t, int64_t token, int64_t channel) {
      if (channel == 0 || (channel == 1 && token < 64))
        problem.v.set(at, static_cast<float>(problem.v.get(at)) * large);
    });
    const LinearAnswer got = run(problem), want = problem.exact();
    for (size_t channel = 0; channel < 16; ++channel) {
      std::vector<double> a, b;
      for (size_t n = channel; n < want.o.size(); n += 16)
        a.push_back(got.o[n]), b.push_back(want.o[n]);
      EXPECT_LE(error(a, b), 2e-6) << "channel " << channel << ", V times " << large;
    }
  }
}

TEST_P(Linear, TakesEveryDtypeAndHeadDim) {
  for (Dtype dtype : {Dtype::f32, Dtype::bf16, Dtype::f16})
    for (int64_t d : {8, 24, 64, 136}) {
      LinearProblem problem({.nq = 100, .nk = 300, .d = d, .dtype = dtype});
      const double limit = dtype == Dtype::f32 ? 1e-6 : dtype == Dtype::f16 ? 4e-4 : 3e-3;
      expect_accurate(problem, limit, std::max(limit, 5e-6));
    }
}

TEST_P(Linear, TakesGroupsBatchesBlocksAndLayouts) {
  for (bool tokens_first : {false, true})
    for (int block_q : {64, 128, 192})
      for (int block_k : {64, 256}) {
        LinearProblem problem({.b = 2,
                               .h = 6,
                               .hk = 2,
                               .nq = 270,
                               .nk = 650,
                               .d = 16,
                               .share = 0.34,
                               .block_q = block_q,
                               .block_k = block_k,
                               .tokens_first = tokens_first});
        expect_accurate(problem, 1e-6, 5e-6);
      }
}

TEST_P(Linear, LengthsAroundBlocksSeeNothingBehindThem) {
  for (int64_t nq : {1, 3, 63, 64, 65, 129})
    for (int64_t nk : {1, 2, 64, 65, 127, 130}) {
      const LinearSizes sizes{.nq = nq, .nk = nk, .d = 16};
      LinearProblem clean(sizes);
      LinearSizes poisoned = sizes;
      poisoned.behind = 70;
      LinearProblem problem(poisoned);
      // Relative errors say little where the gradient of the mean takes all of dk away.
      const LinearAnswer got = run(problem), want = run(clean), exact = clean.exact();
      EXPECT_EQ(got.o, want.o) << sizes.text();
      EXPECT_EQ(got.norm, want.norm) << sizes.text();
      EXPECT_EQ(got.dq, want.dq) << sizes.text();
      EXPECT_EQ(got.dk, want.dk) << sizes.text();
      EXPECT_EQ(got.dv, want.dv) << sizes.text();
      for (auto [a, b] : {std::pair{&got.o, &exact.o},
                          {&got.dq, &exact.dq},
                          {&got.dk, &exact.dk},
                          {&got.dv, &exact.dv}})
        for (size_t n = 0; n < b->size(); ++n)
          ASSERT_NEAR((*a)[n], (*b)[n], 2e-5 * (1 + std::fabs((*b)[n]))) << sizes.text();
    }
}

TEST_P(Linear, NothingLeftGivesZeros) {
  LinearProblem problem({.share = 1.0});
  const LinearAnswer got = run(problem);
  for (const auto* x : {&got.o, &got.norm, &got.dq, &got.dk, &got.dv})
    for (double value : *x) ASSERT_EQ(value, 0.0);
}

// Only block 0 has keys with much of channel 0, where all queries look. Without it, a 1e-12th of
// the total is left: the difference would be rounding noise.
TEST_P(Linear, ExcludedBlocksMayHoldNearlyEverything) {
  LinearProblem problem({.nq = 64, .nk = 640, .d = 16, .share = 0.1, .mean_free_keys = false});
  for (int32_t& block : problem.index) block = 0;
  problem.k.for_each([&](int64_t at, int64_t, int64_t, int64_t t, int64_t c) {
    if (c == 0) problem.k.set(at, t < 64 ? 20.0f : -26.0f);
  });
  problem.q.for_each([&](int64_t at, int64_t, int64_t, int64_t, int64_t c) {
    if (c == 0) problem.q.set(at, 90.0f);
  });
  // Features this close to one-hot leave nothing of dq in FP32.
  const LinearAnswer got = run(problem), want = problem.exact();
  EXPECT_LE(error(got.o, want.o), 1e-5);
  EXPECT_LE(error(got.norm, want.norm), 1e-5);
  EXPECT_LE(error(got.dk, want.dk), 1e-4);
  EXPECT_LE(error(got.dv, want.dv), 1e-5);
}

// The same for the way back: one block of queries has a tiny norm and so a huge dH, but key block 1
// is excluded by it.
TEST_P(Linear, ExcludingQueriesMayHoldNearlyEverything) {
  LinearProblem problem({.nq = 640, .nk = 640, .d = 16, .share = 0.1, .mean_free_keys = false});
  const int64_t rows = problem.rows();
  for (size_t n = 0; n < problem.count.size(); ++n)
    problem.index[n * problem.width] = static_cast<int64_t>(n) % rows == 0 ? 1 : 5;
  problem.k.for_each([&](int64_t at, int64_t, int64_t, int64_t t, int64_t c) {
    if (c == 0) problem.k.set(at, t >= 64 && t < 128 ? 0.0f : -40.0f);
  });
  problem.q.for_each([&](int64_t at, int64_t, int64_t, int64_t t, int64_t c) {
    if (c == 0 && t < 64) problem.q.set(at, 60.0f);
  });
  for (float& x : problem.dnorm) x = 0;
  const LinearAnswer got = run(problem), want = problem.exact();
  // Rows of dV and dK of block 1 alone: the others are as large as dH.
  double dv = 0, dv_size = 0;
  for (int64_t n = 64 * 16; n < 128 * 16; ++n) {
    dv += std::pow(got.dv[n] - want.dv[n], 2), dv_size += std::pow(want.dv[n], 2);
  }
  EXPECT_LE(std::sqrt(dv / dv_size), 1e-5);
}

TEST_P(Linear, ExcludedNansReachNothing) {
  for (double share : {0.2, 0.8}) {
    LinearProblem clean({.nq = 64, .nk = 640, .share = share, .mean_free_keys = false});
    LinearProblem problem(clean.s);
    const auto poison = [&](LinearTensor& x) {
      x.for_each([&](int64_t at, int64_t, int64_t, int64_t t, int64_t) {
        const int64_t j = t / 64;
        if (clean.excludes(0, 0, 0, j) && clean.excludes(0, 1, 0, j)) x.set(at, std::nanf(""));
      });
    };
    for (LinearProblem* p : {&clean, &problem}) {  // both heads exclude the same blocks
      std::copy_n(p->index.begin(), p->width, p->index.begin() + p->width);
    }
    poison(problem.k), poison(problem.v);
    const LinearAnswer got = run(problem), want = run(clean);
    EXPECT_LE(error(got.o, want.o), 1e-6) << share;
    EXPECT_LE(error(got.norm, want.norm), 1e-6) << share;
    EXPECT_LE(error(got.dq, want.dq), 5e-6) << share;
  }
}

TEST_P(Linear, NansThatAreSeenStay) {
  LinearProblem problem({.nq = 64, .nk = 128, .share = 0.0});
  problem.v.set(5, std::nanf(""));
  const LinearAnswer got = run(problem);
  for (int64_t r = 0; r < 64; ++r) ASSERT_TRUE(std::isnan(got.o[r * 32 + 5])) << r;
}

TEST_P(Linear, BitsDependNeitherOnThreadsNorOnTheBatch) {
  const LinearSizes sizes{.b = 2, .h = 4, .hk = 2, .nq = 300, .nk = 700, .share = 0.3};
  LinearProblem problem(sizes);
  Pool one{1}, three{3};
  const LinearAnswer a = run(problem, one.parallel_for());
  const LinearAnswer b = run(problem, three.parallel_for());
  LinearSizes first = sizes;
  first.b = 1;
  LinearProblem alone(first);  // the same numbers, without the second batch entry
  const LinearAnswer c = run(alone, three.parallel_for());
  for (auto part : {&LinearAnswer::o, &LinearAnswer::norm, &LinearAnswer::dq, &LinearAnswer::dk,
                    &LinearAnswer::dv}) {
    EXPECT_EQ(a.*part, b.*part);
    ASSERT_EQ((c.*part).size() * 2, (a.*part).size());
    EXPECT_TRUE(std::equal((c.*part).begin(), (c.*part).end(), (a.*part).begin()));
  }
}

// More than fits into memory at once, so heads are taken in several passes. The batch repeats one
// entry, and so must the results.
TEST_P(Linear, ManyHeadsTakeSeveralPasses) {
  if (GetParam() == "ref") GTEST_SKIP() << "takes one head at a time";
  const LinearSizes sizes{.h = 4, .hk = 4, .nq = 64, .nk = 1600, .d = 256, .share = 0.1};
  LinearSizes repeated = sizes;
  repeated.b = 3;
  LinearProblem problem(sizes);
  const LinearAnswer want = run(problem);
  LinearTensor o(repeated, 4, 64), dq = o, dk(repeated, 4, 1600), dv = dk;
  const auto repeat = [](TensorView& t) { t.shape[0] = 3, t.stride[0] = 0; };
  const auto repeat_inputs = [&](LinearArgs& a) {
    repeat(a.q), repeat(a.k), repeat(a.v);
    a.excluded.stride_batch = 0;
  };
  LinearForwardArgs f = problem.forward_args();
  repeat_inputs(f);
  f.o = o.at(), f.norm = {};
  problem.give_workspace(f, workspace_size(f));
  branch()->forward(spec::resolve(f, true), f, aligned(f.workspace));
  LinearBackwardArgs b = problem.backward_args();
  repeat_inputs(b), repeat(b.dout);
  b.dq = dq.at(), b.dk = dk.at(), b.dv = dv.at(), b.dnorm.stride[0] = 0;
  problem.give_workspace(b, workspace_size(b));
  branch()->backward(spec::resolve(b, true), b, aligned(b.workspace));
  for (int64_t entry = 0; entry < 3; ++entry) {
    EXPECT_EQ(o.values(entry), want.o) << entry;
    EXPECT_EQ(dq.values(entry), want.dq) << entry;
    EXPECT_EQ(dk.values(entry), want.dk) << entry;
    EXPECT_EQ(dv.values(entry), want.dv) << entry;
  }
}

}  // namespace
}  // namespace sagebwd::testing
