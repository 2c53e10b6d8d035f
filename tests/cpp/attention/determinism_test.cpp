// SPDX-License-Identifier: Apache-2.0
// The same inputs give the same bits, from run to run, for any number of threads and any order in
// which the caller's pool runs the work.
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
    "h2 n300 d64 f32 rounding=dither causal",
    "h2 n300 d64 f32 paper rounding=dither smooth_q=on",
    "b2 h4 hk2 nq300 nk500 d64 bf16 keep=0.4 lists=skewed",
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

/// A sequence's bits do not depend on its neighbours: not on how many there are, nor on how long
/// the other documents of a packed batch are. Batches on both sides of the point where a work item
/// becomes a whole head, with enough key blocks for several partial sums of dQ.
TEST_P(Determinism, BatchEntriesStandAlone) {
  const auto part = [](const std::vector<float>& x, size_t index, size_t parts) {
    const size_t n = x.size() / parts;
    return std::vector<float>(x.begin() + index * n, x.begin() + (index + 1) * n);
  };
  for (const char* text : {"b3 h2 nq150 nk200 d32 f32 causal", "b5 h8 nq60 nk520 d16 f32",
                           "b8 h8 hk4 nq40 nk600 d16 bf16 window=500,-1"}) {
    AttentionProblem p = make_problem(text);
    p.dlse = random_rows(p, 4);
    p.partial_kv = true;  // the row sums of dS are added up beside dQ
    const Results whole = run(impl(), p);
    AttentionProblem one = p;
    one.c.b = 1;
    const size_t batch = static_cast<size_t>(p.c.b);
    for (size_t b : {size_t{0}, batch - 1}) {
      one.in = {part(p.in.q, b, batch), part(p.in.dout, b, batch), part(p.in.k, b, batch),
                part(p.in.v, b, batch)};
      one.dlse = part(p.dlse, b, batch);
      const Results alone = run(impl(), one);
      EXPECT_EQ(alone.o, part(whole.o, b, batch)) << text;
      EXPECT_EQ(alone.lse, part(whole.lse, b, batch)) << text;
      EXPECT_EQ(alone.dq, part(whole.dq, b, batch)) << text;
      EXPECT_EQ(alone.dk, part(whole.dk, b, batch)) << text;
      EXPECT_EQ(alone.dv, part(whole.dv, b, batch)) << text;
    }
  }
}

TEST_P(Determinism, DocumentsStandAlone) {
  // The last document, of 400 tokens, alone and behind twenty others of all lengths.
  AttentionProblem packed = make_problem("h2 n2500 d16 f32 causal");
  for (int32_t t = 0; t < 20; ++t) packed.cu_q.push_back(t * 105);
  packed.cu_q.push_back(2100), packed.cu_q.push_back(2500);
  packed.cu_q[4] = packed.cu_q[3];  // an empty one
  packed.cu_k = packed.cu_q;
  const Results whole = run(impl(), packed);
  AttentionProblem one = make_problem("h2 n400 d16 f32 causal");
  const auto last = [](const std::vector<float>& x) {
    const size_t head = x.size() / 2, n = head / 2500 * 400;
    std::vector<float> out(x.begin() + head - n, x.begin() + head);
    out.insert(out.end(), x.end() - n, x.end());
    return out;
  };
  one.in = {last(packed.in.q), last(packed.in.dout), last(packed.in.k), last(packed.in.v)};
  const Results alone = run(impl(), one);
  EXPECT_EQ(alone.o, last(whole.o));
  EXPECT_EQ(alone.dq, last(whole.dq));
  EXPECT_EQ(alone.dk, last(whole.dk));
  EXPECT_EQ(alone.dv, last(whole.dv));
}

SAGE_FOR_ALL_IMPLEMENTATIONS(Determinism);

}  // namespace
}  // namespace sagebwd::testing
