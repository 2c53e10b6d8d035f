// SPDX-License-Identifier: Apache-2.0
// One NaN or Inf in an input reaches exactly the outputs it influences. FP64 attention over the
// visible pairs says which those are. Every other output stays finite, and other heads and batches
// keep their bits.
#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <string>
#include <vector>

#include "support/attention_problem.h"
#include "support/compare.h"
#include "support/implementations.h"

namespace sagebwd::testing {
namespace {

constexpr float kInf = std::numeric_limits<float>::infinity();

enum class Where { q, k, v, dout };
constexpr Where kInputs[] = {Where::q, Where::k, Where::v, Where::dout};
const char* const kNames[] = {"Q", "K", "V", "dO"};

/// Plants `value` in one token of batch 1, (kv) head 1.
AttentionProblem planted(AttentionProblem p, Where where, int64_t token, float value) {
  std::vector<float>* inputs[] = {&p.in.q, &p.in.k, &p.in.v, &p.in.dout};
  const bool queries = where == Where::q || where == Where::dout;
  const int64_t heads = queries ? p.c.h : p.c.hk, n = queries ? p.c.nq : p.c.nk;
  (*inputs[static_cast<int>(where)])[((heads + 1) * n + token) * p.c.d + 5] = value;
  return p;
}

/// Rows (tokens) that hold something that is not finite.
template <typename T>
std::vector<bool> bad_rows(const std::vector<T>& x, int64_t cols) {
  std::vector<bool> bad(x.size() / static_cast<size_t>(cols), false);
  for (size_t i = 0; i < x.size(); ++i)
    if (!std::isfinite(x[i])) bad[i / static_cast<size_t>(cols)] = true;
  return bad;
}

struct Spread {
  std::vector<bool> o, lse, dq, dk, dv;
};

template <typename R>
Spread spread_of(const R& r, int64_t d) {
  return {bad_rows(r.o, d), bad_rows(r.lse, 1), bad_rows(r.dq, d), bad_rows(r.dk, d),
          bad_rows(r.dv, d)};
}

const std::pair<const char*, std::vector<bool> Spread::*> kTensors[] = {{"O", &Spread::o},
                                                                        {"LSE", &Spread::lse},
                                                                        {"dQ", &Spread::dq},
                                                                        {"dK", &Spread::dk},
                                                                        {"dV", &Spread::dv}};

/// Every row of `least` is in `got`, and every row of `got` is in `most`.
void expect_between(const Spread& least, const Spread& got, const Spread& most,
                    const std::string& what) {
  for (const auto& [name, member] : kTensors)
    for (size_t i = 0; i < (got.*member).size(); ++i) {
      EXPECT_TRUE(!(least.*member)[i] || (got.*member)[i])
          << name << " row " << i << " hides it: " << what;
      EXPECT_TRUE(!(got.*member)[i] || (most.*member)[i])
          << name << " row " << i << " should be finite: " << what;
      if (::testing::Test::HasFailure()) return;
    }
}

/// Elements of batch 0, and of the heads of batch 1 that do not share the planted kv head.
void expect_others_unchanged(const AttentionProblem& p, const Results& clean, const Results& got,
                             const std::string& what) {
  const auto same = [&](const char* name, const std::vector<float>& a, const std::vector<float>& b,
                        int64_t heads, int64_t rows, int64_t first, int64_t last) {
    for (int64_t bh = 0; bh < p.c.b * heads; ++bh) {
      if (bh / heads == 1 && bh % heads >= first && bh % heads < last) continue;
      for (int64_t i = bh * rows; i < (bh + 1) * rows; ++i)
        ASSERT_EQ(a[i], b[i]) << name << " of another head: " << what;
    }
  };
  const int64_t group = p.c.h / p.c.hk, nq = p.c.nq * p.c.d, nk = p.c.nk * p.c.d;
  // A planted kv head touches its whole group; a planted query head its own kv head.
  const int64_t kv = 1, first = kv * group, last = first + group;
  same("O", clean.o, got.o, p.c.h, nq, std::min<int64_t>(first, 1), last);
  same("dQ", clean.dq, got.dq, p.c.h, nq, std::min<int64_t>(first, 1), last);
  same("dK", clean.dk, got.dk, p.c.hk, nk, 1 / group, kv + 1);
  same("dV", clean.dv, got.dv, p.c.hk, nk, 1 / group, kv + 1);
}

class NonFinite : public PerImplementation {};

TEST_P(NonFinite, NanSpreadsAsExactMathsSays) {
  for (const char* text :
       {"b2 h4 hk2 nq150 nk200 d32 f32 causal", "b2 h2 nq150 nk200 d32 bf16 causal window=20,0",
        "b2 h2 n150 d32 f32", "b2 h2 n150 d40 f32 causal", "b2 h2 n150 d32 f32 causal smooth_k=off",
        "b2 h2 n150 d32 f16 causal rounding=dither", "b2 h2 n150 d40 bf16 softcap=3",
        "b2 h2 n200 d32 f32 causal tile=128x64"}) {
    const AttentionProblem p = make_problem(text);
    const Results clean = run(impl(), p);
    for (Where where : kInputs)
      for (int64_t token : {0, 70, 149}) {
        const AttentionProblem q = planted(p, where, token, std::nanf(""));
        const std::string what = std::string(kNames[static_cast<int>(where)]) + " token " +
                                 std::to_string(token) + ", " + p.describe();
        const Spread want = spread_of(exact(q), p.c.d);
        const Results got = run(impl(), q);
        expect_between(want, spread_of(got, p.c.d), want, what);
        expect_others_unchanged(p, clean, got, what);
      }
  }
}

/// Which channels of O a NaN in V reaches: all of them where the value's codes are 0, and only its
/// own in `paper`.
TEST_P(NonFinite, ChannelsThatANanInAValueReaches) {
  for (const char* recipe : {"", " paper"}) {
    const AttentionProblem p =
        planted(make_problem(std::string("b2 h2 n150 d32 f32 causal") + recipe), Where::v, 60,
                std::nanf(""));
    const bool all = p.c.recipe.scheme == Scheme::vectorwise;
    const Results got = run(impl(), p);
    for (int64_t i = 0; i < 150; ++i)
      for (int64_t c = 0; c < 32; ++c)
        EXPECT_EQ(std::isnan(got.o[(3 * 150 + i) * 32 + c]), (all || c == 5) && i >= 60)
            << i << ", " << c << recipe;
  }
}

/// Inf: at least where exact maths has something that is not finite, at most where a NaN would
/// reach.
TEST_P(NonFinite, InfinityIsNeverHidden) {
  for (const char* text : {"b2 h4 hk2 nq150 nk200 d32 f32 causal", "b2 h2 n150 d32 bf16"}) {
    const AttentionProblem p = make_problem(text);
    const Results clean = run(impl(), p);
    for (Where where : kInputs)
      for (float value : {kInf, -kInf}) {
        const AttentionProblem q = planted(p, where, 70, value);
        const std::string what = std::string(kNames[static_cast<int>(where)]) + " " +
                                 std::to_string(value) + ", " + p.describe();
        const Results got = run(impl(), q);
        expect_between(spread_of(exact(q), p.c.d), spread_of(got, p.c.d),
                       spread_of(exact(planted(p, where, 70, std::nanf(""))), p.c.d), what);
        expect_others_unchanged(p, clean, got, what);
      }
  }
}

/// A logit of -Inf would give P = 0 and a finite O, and the backward a NaN.
TEST_P(NonFinite, InfinityCountsAsNanWhereSIsLifted) {
  for (const char* lift : {"S", "S,S'", "S,S',dQ,dK"}) {
    const AttentionProblem p = make_problem(std::string("b2 h2 n150 d32 f32 lift=") + lift);
    for (Where where : {Where::q, Where::k})
      for (float value : {kInf, -kInf}) {
        const std::string what = std::string(kNames[static_cast<int>(where)]) + " " +
                                 std::to_string(value) + ", " + p.describe();
        const Spread want = spread_of(exact(planted(p, where, 70, std::nanf(""))), p.c.d);
        const Spread got = spread_of(run(impl(), planted(p, where, 70, value)), p.c.d);
        EXPECT_EQ(got.o, want.o) << what;
        EXPECT_EQ(got.lse, want.lse) << what;
      }
  }
}

/// O is a mean of V; where the codes of P add up to more than 1 it must not leave FP16.
TEST_P(NonFinite, ValuesAtTheEndOfFp16) {
  for (const char* text : {"b2 h2 n200 d64 f16 paper", "b2 h2 n200 d64 f16"})
    for (float sign : {1.0f, -1.0f}) {
      AttentionProblem p = make_problem(text);
      for (float& x : p.in.v) x = sign * 65504.0f;
      for (float& x : p.in.dout) x *= 1e-4f;
      const Results got = run(impl(), p);
      for (const auto* x : {&got.o, &got.dq, &got.dk, &got.dv})
        for (float value : *x) ASSERT_TRUE(std::isfinite(value)) << p.describe();
      for (float value : got.o) ASSERT_NEAR(value * sign, 65504.0f, 1000.0f) << p.describe();
    }
}

/// A lifted matmul also multiplies the zeros of masked pairs, so a NaN may reach the rest of its
/// tile. It is never hidden and never leaves its head.
TEST_P(NonFinite, LiftedMatmulsKeepItInItsHead) {
  for (const char* lift : {"dV", "dQ", "dK", "S,O,S',dV,dP,dQ,dK"}) {
    const AttentionProblem p = make_problem(std::string("b2 h2 n150 d32 f32 causal lift=") + lift);
    const Results clean = run(impl(), p);
    for (Where where : kInputs) {
      const AttentionProblem q = planted(p, where, 70, std::nanf(""));
      const std::string what = std::string(kNames[static_cast<int>(where)]) + ", " + p.describe();
      const Results got = run(impl(), q);
      Spread everything = spread_of(got, p.c.d);
      for (const auto& [name, member] : kTensors)
        (everything.*member).assign((everything.*member).size(), true);
      expect_between(spread_of(exact(q), p.c.d), spread_of(got, p.c.d), everything, what);
      expect_others_unchanged(p, clean, got, what);
    }
  }
}

/// `paper` shares scales inside a tile, but a token that is not finite is left out of them.
TEST_P(NonFinite, PaperNeverHidesItAndKeepsItInItsTiles) {
  const AttentionProblem p = make_problem("b2 h2 n300 d32 f32 causal paper");
  const Results clean = run(impl(), p);
  for (Where where : kInputs) {
    const AttentionProblem q = planted(p, where, 140, std::nanf(""));
    const std::string what = std::string(kNames[static_cast<int>(where)]) + ", " + p.describe();
    const Spread least = spread_of(exact(q), p.c.d);
    Spread most = least;
    for (const auto& [name, member] : kTensors) {
      const bool queries = member == &Spread::o || member == &Spread::lse || member == &Spread::dq;
      const size_t tile = queries ? 128 : 64, n = 300;
      for (size_t head = 0; head < 4; ++head)
        for (size_t i = 0; i < n; ++i)
          if ((least.*member)[head * n + i])
            for (size_t t = i / tile * tile; t < std::min(n, (i / tile + 1) * tile); ++t)
              (most.*member)[head * n + t] = true;
    }
    const Results got = run(impl(), q);
    expect_between(least, spread_of(got, p.c.d), most, what);
    expect_others_unchanged(p, clean, got, what);
  }
}

TEST_P(NonFinite, NanInDlseReachesItsRow) {
  AttentionProblem p = make_problem("b2 h2 n150 d32 f32 causal");
  p.dlse = random_rows(p, 1);
  p.dlse[3 * 150 + 70] = std::nanf("");
  const Spread want = spread_of(exact(p), p.c.d);
  expect_between(want, spread_of(run(impl(), p), p.c.d), want, "dLSE");
}

TEST_P(NonFinite, MaxLogitTellsOfANanLogit) {
  const AttentionProblem p =
      planted(make_problem("b2 h2 n150 d32 f32 causal"), Where::k, 70, std::nanf(""));
  const Results got = run(impl(), p);
  for (size_t i = 0; i < 4; ++i) EXPECT_EQ(std::isnan(got.max_logit[i]), i == 3) << i;
}

/// Junk in other documents, masked keys and padding never leaks.
TEST_P(NonFinite, OtherDocumentsAndMaskedKeysDoNotLeak) {
  AttentionProblem p = make_problem("h2 nq150 nk200 d32 f32 causal");
  p.cu_q = {0, 50, 100, 150};
  p.cu_k = {0, 70, 130, 200};
  const Results clean = run(impl(), p);
  AttentionProblem q = p;
  for (int64_t h = 0; h < 2; ++h)
    for (int64_t j = 70; j < 130; ++j)  // all of document 1
      for (int64_t c = 0; c < 32; ++c)
        q.in.k[(h * 200 + j) * 32 + c] = q.in.v[(h * 200 + j) * 32 + c] = std::nanf("");
  const Results got = run(impl(), q);
  for (int64_t h = 0; h < 2; ++h)
    for (int64_t i = 0; i < 150; ++i)
      for (int64_t c = 0; c < 32; ++c) {
        const int64_t at = (h * 150 + i) * 32 + c;
        if (i >= 50 && i < 100) {
          EXPECT_TRUE(std::isnan(got.o[at]));
        } else {
          ASSERT_EQ(got.o[at], clean.o[at]) << i;
          ASSERT_EQ(got.dq[at], clean.dq[at]) << i;
        }
      }
}

SAGE_FOR_ALL_IMPLEMENTATIONS(NonFinite);

}  // namespace
}  // namespace sagebwd::testing
