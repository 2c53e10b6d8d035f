// SPDX-License-Identifier: Apache-2.0
// K14: the same inputs give the same bits, from run to run, for any number of threads and any order
// in which the caller's pool runs the work.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <string>
#include <vector>

#include "support/attention_problem.h"
#include "support/implementations.h"
#include "support/pool.h"

namespace sagebwd::testing {
namespace {

const char* const kCases[] = {
    "b2 h4 hk2 nq300 nk500 d64 bf16 causal",
    "h1 n700 d64 bf16",
    "h2 n300 d40 f32 paper window=100,10",
    "h2 n300 d64 f32 rounding=dither smooth_q=on causal",
};

class Determinism : public PerImplementation {};

TEST_P(Determinism, AnyNumberOfThreadsInAnyOrder) {
  for (const char* text : kCases) {
    AttentionProblem p = make_problem(text);
    p.dlse = random_rows(p, 2);
    for (bool partial_kv : {false, true}) {
      p.partial_kv = partial_kv;
      Pool one{1};
      const Results want = run(impl(), p, {.parallel_for = one.parallel_for()});
      for (int threads : {1, 2, 3, 5}) {
        Pool pool{threads, static_cast<uint64_t>(10 * threads)};
        EXPECT_EQ(first_difference(want, run(impl(), p, {.parallel_for = pool.parallel_for()})), "")
            << threads << " threads, " << p.describe();
      }
      EXPECT_EQ(first_difference(want, run(impl(), p)), "") << "own threads, " << p.describe();
    }
  }
}

/// The library's own threads, as SAGEBWD_THREADS sets them. The scratch memory of a call grows with
/// their number, so this also moves every buffer.
TEST_P(Determinism, AnyNumberOfOwnThreads) {
  const char* before = std::getenv("SAGEBWD_THREADS");
  const std::string saved = before != nullptr ? before : "";
  const AttentionProblem p = make_problem(kCases[0]);
  Pool one{1};
  const Results want = run(impl(), p, {.parallel_for = one.parallel_for()});
  for (const char* threads : {"1", "2", "3", "5", "16"}) {
    setenv("SAGEBWD_THREADS", threads, 1);
    EXPECT_EQ(first_difference(want, run(impl(), p)), "") << threads << " threads";
  }
  before != nullptr ? setenv("SAGEBWD_THREADS", saved.c_str(), 1) : unsetenv("SAGEBWD_THREADS");
}

TEST_P(Determinism, FiftyRepeatsOfManySmallProblems) {
  const AttentionProblem p = make_problem("b60 h1 nq20 nk33 d16 bf16 causal");
  const Results want = run(impl(), p);
  for (int repeat = 0; repeat < 50; ++repeat) {
    Pool pool{3, static_cast<uint64_t>(repeat)};
    ASSERT_EQ(first_difference(want, run(impl(), p, {.parallel_for = pool.parallel_for()})), "")
        << "repeat " << repeat;
  }
}

/// A batch entry's result does not depend on its neighbours, apart from the order in which parts of
/// dQ are added: how many parts there are follows from the size of the batch.
TEST_P(Determinism, BatchEntriesStandAlone) {
  const AttentionProblem p = make_problem("b3 h2 nq150 nk200 d32 f32 causal");
  const Results whole = run(impl(), p);
  AttentionProblem one = p;
  one.c.b = 1;
  const auto part = [](const std::vector<float>& x, size_t index) {
    const size_t n = x.size() / 3;
    return std::vector<float>(x.begin() + index * n, x.begin() + (index + 1) * n);
  };
  for (size_t b = 0; b < 3; ++b) {
    one.in = {part(p.in.q, b), part(p.in.dout, b), part(p.in.k, b), part(p.in.v, b)};
    const Results alone = run(impl(), one);
    EXPECT_EQ(alone.o, part(whole.o, b));
    EXPECT_EQ(alone.lse, part(whole.lse, b));
    EXPECT_EQ(alone.dk, part(whole.dk, b));
    EXPECT_EQ(alone.dv, part(whole.dv, b));
    double error = 0, size = 0;
    const std::vector<float> dq = part(whole.dq, b);
    for (size_t i = 0; i < dq.size(); ++i)
      error = std::max<double>(error, std::abs(dq[i] - alone.dq[i])),
      size = std::max<double>(size, std::abs(dq[i]));
    EXPECT_LT(error, 1e-6 * size);
  }
}

SAGE_FOR_ALL_IMPLEMENTATIONS(Determinism);

}  // namespace
}  // namespace sagebwd::testing
