// SPDX-License-Identifier: Apache-2.0
// LSE of the true logits, its gradient, calls that see part of the keys, and the largest logit. All
// tests have a large mean key, which K-smoothing subtracts and has to add back.
#include <gtest/gtest.h>

#include <cmath>
#include <string>
#include <vector>

#include "support/attention_problem.h"
#include "support/compare.h"
#include "support/implementations.h"

namespace sagebwd::testing {
namespace {

/// Adds ±offset or 0 to the channels of every key.
AttentionProblem with_key_offset(const std::string& text, float offset) {
  AttentionProblem p = make_problem(text);
  for (size_t i = 0; i < p.in.k.size(); ++i)
    p.in.k[i] += offset * static_cast<float>(static_cast<int64_t>(i) % p.c.d % 3 - 1);
  p.round_inputs();
  return p;
}

const char* const kLiftAll = " lift=S,O,S',dV,dP,dQ,dK";

class Lse : public PerImplementation {};

TEST_P(Lse, IsOfTheTrueLogits) {
  for (float offset : {0.0f, 10.0f, 100.0f})
    for (const char* text : {"h2 n200 d64 f32 causal", "h2 n200 d64 f32 paper"}) {
      const AttentionProblem p = with_key_offset(text, offset);
      // The error is that of INT8 logits, in `paper` whatever the offset. `vectorwise` has the
      // error of the codes of Q times the centre beside it: a deviation of .005 for each 1 of
      // offset, with logits of .8.
      const bool paper = p.c.recipe.scheme == Scheme::paper;
      const double most = 0.05 + (paper ? 0.0 : 0.02 * static_cast<double>(offset));
      EXPECT_TRUE(
          elementwise("LSE", run(impl(), p).lse, exact(p).lse, p.row_shape(), most, 1e-6, p))
          << offset;
      const AttentionProblem q = with_key_offset(std::string(text) + kLiftAll, offset);
      EXPECT_TRUE(
          elementwise("LSE", run(impl(), q).lse, exact(q).lse, q.row_shape(), 2e-5, 1e-6, q))
          << offset;
    }
}

/// The backward rebuilds the P that LSE was made from: its rows sum to one. With dO the identity
/// and dV lifted, dV is P itself, transposed.
TEST_P(Lse, RecomputedProbabilitiesSumToOne) {
  for (const char* text :
       {"nq64 nk300 d64 f32 lift=dV", "nq64 nk300 d64 f32 lift=dV paper",
        "nq64 nk300 d64 f32 lift=dV paper smooth_q=on causal", "nq64 nk300 d64 f32 lift=S,S',dV"}) {
    AttentionProblem p = with_key_offset(text, 10.0f);
    for (int64_t i = 0; i < 64; ++i)
      for (int64_t c = 0; c < 64; ++c) p.in.dout[i * 64 + c] = i == c ? 1.0f : 0.0f;
    const Results got = run(impl(), p);
    for (int64_t i = 0; i < 64; ++i) {
      double sum = 0;
      for (int64_t j = 0; j < 300; ++j) sum += got.dv[j * 64 + i];
      EXPECT_NEAR(sum, 1.0, 1e-5) << "row " << i << " of " << p.describe();
    }
  }
}

TEST_P(Lse, ItsGradientReachesQueriesAndKeys) {
  for (float offset : {0.0f, 10.0f})
    for (const char* text : {"h2 n200 d64 f32 causal", "h4 hk2 nq150 nk250 d64 f32 paper"}) {
      AttentionProblem p = with_key_offset(text, offset);
      p.dlse = random_rows(p, 7);
      const double gate = p.c.recipe.scheme == Scheme::paper ? 0.08 : 0.04;
      EXPECT_TRUE(
          accurate(run(impl(), p), exact(p), {.o = 0.03, .dq = gate, .dk = gate, .dv = gate}, p));
      AttentionProblem q = with_key_offset(std::string(text) + kLiftAll, offset);
      q.dlse = p.dlse;
      EXPECT_TRUE(
          accurate(run(impl(), q), exact(q), {.o = 2e-5, .dq = 2e-5, .dk = 2e-5, .dv = 2e-5}, q));
      // Without dLSE the answer differs, so the term cannot have been dropped.
      AttentionProblem without = q;
      without.dlse.clear();
      EXPECT_FALSE(
          close("dQ", run(impl(), without).dq, exact(q).dq, q.q_shape(), {.rel_l2 = 0.1}, q));
    }
}

/// A row that sees no key has no dS, whatever its dLSE.
TEST_P(Lse, GradientOfAnEmptyRowIsNothing) {
  AttentionProblem p = with_key_offset("nq200 nk120 d64 f32 causal", 10.0f);
  p.dlse.assign(200, 3.0f);
  const Results got = run(impl(), p);
  for (int64_t i = 0; i < 80 * 64; ++i) ASSERT_EQ(got.dq[i], 0.0f) << i;
}

/// Two calls over the halves of the keys, merged by their LSE, then two backward calls with the
/// merged O and LSE: what a ring step does.
struct TwoChunks {
  TwoChunks(const dispatch::Implementation& impl, const AttentionProblem& whole, int64_t cut)
      : p(whole) {
    const spec::AttnCase& c = whole.c;
    for (int part = 0; part < 2; ++part) {
      const int64_t begin = part == 0 ? 0 : cut, end = part == 0 ? cut : c.nk;
      AttentionProblem& q = chunk[part];
      q = whole;
      q.c.nk = end - begin;
      q.in.k.clear(), q.in.v.clear();
      for (int64_t h = 0; h < c.hk; ++h)
        for (auto [from, to] : {std::pair{&whole.in.k, &q.in.k}, {&whole.in.v, &q.in.v}})
          to->insert(to->end(), from->begin() + (h * c.nk + begin) * c.d,
                     from->begin() + (h * c.nk + end) * c.d);
      forward[part] = run(impl, q, {.backward = false});
    }
    merged = forward[0];
    for (size_t row = 0; row < merged.lse.size(); ++row) {
      const double a = forward[0].lse[row], b = forward[1].lse[row], top = std::max(a, b);
      const double wa = std::exp(a - top), wb = std::exp(b - top);
      merged.lse[row] = static_cast<float>(top + std::log(wa + wb));
      for (int64_t ch = 0; ch < c.d; ++ch) {
        const size_t at = row * static_cast<size_t>(c.d) + static_cast<size_t>(ch);
        merged.o[at] =
            static_cast<float>((wa * forward[0].o[at] + wb * forward[1].o[at]) / (wa + wb));
      }
    }
    merged.dq.assign(merged.o.size(), 0.0f);
    for (int part = 0; part < 2; ++part) {
      chunk[part].partial_kv = true;
      const Results r = run(impl, chunk[part], {.o = &merged.o, .lse = &merged.lse});
      for (size_t i = 0; i < merged.dq.size(); ++i) merged.dq[i] += r.dq[i];
      dk[part] = r.dk, dv[part] = r.dv;
    }
    for (int64_t h = 0; h < c.hk; ++h)
      for (int part = 0; part < 2; ++part) {
        const int64_t n = chunk[part].c.nk * c.d;
        merged.dk.insert(merged.dk.end(), dk[part].begin() + h * n, dk[part].begin() + (h + 1) * n);
        merged.dv.insert(merged.dv.end(), dv[part].begin() + h * n, dv[part].begin() + (h + 1) * n);
      }
  }

  const AttentionProblem& p;
  AttentionProblem chunk[2];
  Results forward[2], merged;
  std::vector<float> dk[2], dv[2];
};

TEST_P(Lse, TwoChunksOfKeysMergeToTheWhole) {
  for (float offset : {0.0f, 10.0f})
    for (bool dlse : {false, true}) {
      AttentionProblem p = with_key_offset("h4 hk2 nq150 nk300 d64 f32", offset);
      AttentionProblem q =
          with_key_offset(std::string("h4 hk2 nq150 nk300 d64 f32") + kLiftAll, offset);
      // Different means of the two halves, so that their smoothing differs.
      for (AttentionProblem* x : {&p, &q})
        for (int64_t h = 0; h < 2; ++h)
          for (int64_t i = 0; i < 130 * 64; ++i)
            x->in.k[h * 300 * 64 + i] += i % 2 == 0 ? 0.5f : -0.3f;
      if (dlse) p.dlse = q.dlse = random_rows(p, 8);
      const TwoChunks int8(impl(), p, 130), lifted(impl(), q, 130);
      // The row sums of dS have the error that codes of P put into D, and are multiplied by the
      // mean key: dQ is .056 wrong at an offset of 10 (.11 with 127 levels of P).
      EXPECT_TRUE(accurate(int8.merged, exact(p),
                           {.o = 0.03, .dq = offset > 0 ? 0.12 : 0.04, .dk = 0.04, .dv = 0.03}, p))
          << offset;
      p.c.recipe.high_precision = kMatmulO;
      EXPECT_TRUE(accurate(TwoChunks(impl(), p, 130).merged, exact(p),
                           {.o = 0.03, .dq = 0.04, .dk = 0.04, .dv = 0.03}, p))
          << offset;
      EXPECT_TRUE(
          accurate(lifted.merged, exact(q), {.o = 2e-5, .dq = 5e-5, .dk = 2e-5, .dv = 2e-5}, q))
          << offset;
    }
}

/// The flag matters: without it dQ of a ring step is wrong by the mean key, which its operand
/// lacks.
TEST_P(Lse, PartialKeysNeedTheirFlag) {
  const AttentionProblem p = with_key_offset("nq150 nk300 d64 f32 lift=S,O,S',dV,dP,dK", 10.0f);
  const TwoChunks chunks(impl(), p, 130);
  std::vector<float> dq(chunks.merged.dq.size(), 0.0f);
  for (AttentionProblem chunk : chunks.chunk) {
    chunk.partial_kv = false;
    const Results r = run(impl(), chunk, {.o = &chunks.merged.o, .lse = &chunks.merged.lse});
    for (size_t i = 0; i < dq.size(); ++i) dq[i] += r.dq[i];
  }
  EXPECT_FALSE(close("dQ", dq, exact(p).dq, p.q_shape(), {.rel_l2 = 0.05}, p));
}

TEST_P(Lse, MaxLogitIsTheLargestTrueLogit) {
  for (float offset : {0.0f, 10.0f}) {
    AttentionProblem p = with_key_offset("b2 h4 hk2 nq100 nk150 d64 f32 causal", offset);
    const Shape shape{1, 1, 2, 4};
    const double most = offset == 0.0f ? 0.08 : 0.14;  // as for LSE: .115
    EXPECT_TRUE(elementwise("max_logit", run(impl(), p).max_logit, exact(p).max_logit, shape, most,
                            1e-5, p));
    p.c.recipe.high_precision = kMatmulAll;
    EXPECT_TRUE(elementwise("max_logit", run(impl(), p).max_logit, exact(p).max_logit, shape, 2e-5,
                            1e-6, p));
  }
  // Documents have their own, -inf where nothing is visible.
  AttentionProblem p = with_key_offset("h2 nq100 nk150 d64 f32 causal lift=S", 10.0f);
  p.cu_q = {0, 40, 60, 60, 100};
  p.cu_k = {0, 70, 70, 90, 150};
  const Results got = run(impl(), p);
  EXPECT_TRUE(
      elementwise("max_logit", got.max_logit, exact(p).max_logit, {1, 1, 4, 2}, 2e-5, 1e-6, p));
  EXPECT_EQ(got.max_logit[2], -std::numeric_limits<float>::infinity());
}

SAGE_FOR_ALL_IMPLEMENTATIONS(Lse);

}  // namespace
}  // namespace sagebwd::testing
