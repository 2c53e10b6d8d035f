// SPDX-License-Identifier: Apache-2.0
// Grouped and shared key heads, packed documents, memory layouts, element types and head
// dimensions.
#include <gtest/gtest.h>

#include <string>
#include <vector>

#include "support/attention_problem.h"
#include "support/compare.h"
#include "support/implementations.h"
#include "support/tokens.h"

namespace sagebwd::testing {
namespace {

class Heads : public PerImplementation {};

TEST_P(Heads, GroupedKeysEqualRepeatedKeys) {
  for (const char* text : {"b2 h6 hk2 nq100 nk150 d32 f32 causal", "b2 h4 hk1 nq150 nk100 d40 f32",
                           "h4 hk2 n200 d64 f32 paper smooth_q=on"}) {
    const AttentionProblem p = make_problem(text);
    const spec::AttnCase& c = p.c;
    const int64_t group = c.h / c.hk, head = c.nk * c.d;
    AttentionProblem repeated = p;
    repeated.c.hk = c.h;
    repeated.in.k.clear(), repeated.in.v.clear();
    for (int64_t bh = 0; bh < c.b * c.h; ++bh) {
      const int64_t from = (bh / c.h * c.hk + bh % c.h / group) * head;
      repeated.in.k.insert(repeated.in.k.end(), p.in.k.begin() + from,
                           p.in.k.begin() + from + head);
      repeated.in.v.insert(repeated.in.v.end(), p.in.v.begin() + from,
                           p.in.v.begin() + from + head);
    }
    const Results got = run(impl(), p), want = run(impl(), repeated);
    EXPECT_EQ(got.o, want.o) << p.describe();
    EXPECT_EQ(got.lse, want.lse) << p.describe();
    // How many parts dQ is added from depends on the number of key heads.
    EXPECT_TRUE(close("dQ", got.dq, want.dq, p.q_shape(), {.rel_l2 = 1e-6}, p));
    std::vector<double> dk(got.dk.size(), 0.0), dv(dk);
    for (int64_t bh = 0; bh < c.b * c.h; ++bh)
      for (int64_t i = 0; i < head; ++i) {
        const int64_t to = (bh / c.h * c.hk + bh % c.h / group) * head + i;
        dk[to] += want.dk[bh * head + i], dv[to] += want.dv[bh * head + i];
      }
    EXPECT_TRUE(close("dK", got.dk, dk, p.k_shape(), {.rel_l2 = 1e-6}, p));
    EXPECT_TRUE(close("dV", got.dv, dv, p.k_shape(), {.rel_l2 = 1e-6}, p));
  }
}

AttentionProblem packed(const std::string& text) {
  AttentionProblem p = make_problem(text);
  p.cu_q = {0, 0, 130, 131, 131, 250, 300, 400};
  p.cu_k = {0, 60, 60, 200, 200, 203, 371, 500};
  return p;
}

TEST_P(Heads, DocumentsEqualSeparateCalls) {
  for (const char* text : {"h4 hk2 nq400 nk500 d32 f32 causal", "h2 nq400 nk500 d64 f32 paper",
                           "h2 nq400 nk500 d64 f32 causal",
                           "h2 nq400 nk500 d24 f32 window=30,7 align=top_left paper smooth_q=on"}) {
    AttentionProblem p = packed(text);
    p.dlse = random_rows(p, 4);
    const spec::AttnCase& c = p.c;
    const Results whole = run(impl(), p);
    for (int64_t t = 0; t < p.num_documents(); ++t) {
      const int64_t q0 = p.cu_q[t], q1 = p.cu_q[t + 1], k0 = p.cu_k[t], k1 = p.cu_k[t + 1];
      AttentionProblem one = p;
      one.cu_q.clear(), one.cu_k.clear();
      one.c.nq = q1 - q0, one.c.nk = k1 - k0;
      one.in = {tokens(p.in.q, c.h, c.nq, c.d, q0, q1), tokens(p.in.dout, c.h, c.nq, c.d, q0, q1),
                tokens(p.in.k, c.hk, c.nk, c.d, k0, k1), tokens(p.in.v, c.hk, c.nk, c.d, k0, k1)};
      one.dlse = tokens(p.dlse, c.h, c.nq, 1, q0, q1);
      const Results alone = run(impl(), one);
      const std::string what = "document " + std::to_string(t) + " of " + p.describe();
      EXPECT_EQ(alone.o, tokens(whole.o, c.h, c.nq, c.d, q0, q1)) << what;
      EXPECT_EQ(alone.lse, tokens(whole.lse, c.h, c.nq, 1, q0, q1)) << what;
      EXPECT_EQ(alone.dk, tokens(whole.dk, c.hk, c.nk, c.d, k0, k1)) << what;
      EXPECT_EQ(alone.dv, tokens(whole.dv, c.hk, c.nk, c.d, k0, k1)) << what;
      EXPECT_TRUE(close("dQ", alone.dq, tokens(whole.dq, c.h, c.nq, c.d, q0, q1), one.q_shape(),
                        {.rel_l2 = 1e-6, .floor_norm = 1e-5}, one));
      for (int64_t h = 0; h < c.h; ++h)
        EXPECT_EQ(alone.max_logit[h], whole.max_logit[t * c.h + h]) << what;
    }
  }
}

/// Means and scales are taken per document: another document's content changes no bit.
TEST_P(Heads, DocumentsDoNotSeeEachOther) {
  const AttentionProblem p = packed("h2 nq400 nk500 d32 f32 causal paper smooth_q=on");
  AttentionProblem q = p;
  for (int64_t h = 0; h < 2; ++h) {
    for (int64_t i = 131 * 32; i < 250 * 32; ++i) q.in.q[h * 400 * 32 + i] = 50.0f;
    for (int64_t i = 203 * 32; i < 371 * 32; ++i) q.in.k[h * 500 * 32 + i] *= 30.0f;
  }
  const Results a = run(impl(), p), b = run(impl(), q);
  const auto outside = [](const std::vector<float>& x, int64_t n, int64_t begin, int64_t end) {
    std::vector<float> head = tokens(x, 2, n, 32, 0, begin), tail = tokens(x, 2, n, 32, end, n);
    head.insert(head.end(), tail.begin(), tail.end());
    return head;
  };
  // Queries 131 … 249 belong to document 4, keys 203 … 370 to document 5 with queries 250 … 299.
  EXPECT_EQ(outside(a.o, 400, 131, 300), outside(b.o, 400, 131, 300));
  EXPECT_EQ(outside(a.dq, 400, 131, 300), outside(b.dq, 400, 131, 300));
  EXPECT_EQ(outside(a.dk, 500, 200, 371), outside(b.dk, 500, 200, 371));
  EXPECT_EQ(outside(a.dv, 500, 200, 371), outside(b.dv, 500, 200, 371));
  EXPECT_NE(a.o, b.o);
}

SAGE_FOR_ALL_IMPLEMENTATIONS(Heads);

class Layouts : public PerImplementation {};

/// Any strides give the bits of the contiguous layout.
TEST_P(Layouts, AllGiveTheSameBits) {
  for (const char* text : {"b2 h4 hk2 nq70 nk90 d24 f32 causal", "b2 h2 nq70 nk90 d64 bf16"}) {
    AttentionProblem p = make_problem(text);
    p.dlse = random_rows(p, 6);
    const Results want = run(impl(), p);
    p.c.layout = spec::Layout::bshd;
    EXPECT_EQ(first_difference(want, run(impl(), p)), "") << "bshd";
    // [n, b, h, d], as trainers with the sequence in front keep it.
    const auto sequence_first = [](const std::string&, const Shape& s) {
      return Placement{{s[1] * s[3], s[3], s[0] * s[1] * s[3], 1}, 0};
    };
    EXPECT_EQ(first_difference(want, run(impl(), p, {.place = sequence_first})), "");
    // Slices of a fused buffer [b, n, heads of all, d]: a token stride wider than one tensor's
    // heads.
    const auto fused = [](const std::string&, const Shape& s) {
      const int64_t token = 3 * s[1] * s[3] + 8;
      return Placement{{s[2] * token, s[3], token, 1}, s[3]};
    };
    EXPECT_EQ(first_difference(want, run(impl(), p, {.place = fused})), "");
    // An odd offset: vectors start anywhere.
    const auto unaligned = [](const std::string&, const Shape& s) {
      Placement place = dense(s);
      place.offset = 3;
      return place;
    };
    EXPECT_EQ(first_difference(want, run(impl(), p, {.place = unaligned})), "");
  }
}

/// Inputs of stride zero: one batch entry, or one head, seen many times.
TEST_P(Layouts, ExpandedInputs) {
  AttentionProblem p = make_problem("b3 h2 nq70 nk90 d32 f32");
  for (auto* x : {&p.in.k, &p.in.v}) {  // the same keys for all batches and heads
    const size_t head = x->size() / 6;
    for (size_t i = head; i < x->size(); ++i) (*x)[i] = (*x)[i % head];
  }
  const auto expanded = [](const std::string& tensor, const Shape& s) {
    Placement place = dense(s);
    if (tensor == "k" || tensor == "v") place.stride[0] = place.stride[1] = 0;
    return place;
  };
  EXPECT_EQ(first_difference(run(impl(), p), run(impl(), p, {.place = expanded})), "");
}

/// The stride of a dimension of size one means nothing.
TEST_P(Layouts, AbsurdStridesOfSizeOne) {
  const AttentionProblem p = make_problem("b1 h1 nq70 nk90 d32 f32 causal");
  const auto absurd = [](const std::string&, const Shape& s) {
    Placement place = dense(s);
    place.stride[0] = int64_t{1} << 60, place.stride[1] = 12345678901;
    return place;
  };
  EXPECT_EQ(first_difference(run(impl(), p), run(impl(), p, {.place = absurd})), "");
}

SAGE_FOR_ALL_IMPLEMENTATIONS(Layouts);

class HeadDims : public PerImplementation {};

TEST_P(HeadDims, EveryMultipleOfEight) {
  for (int d = 8; d <= 256; d += 8) {
    const std::string text = "h2 hk1 nq100 nk140 causal d" + std::to_string(d);
    for (const char* recipe : {" f32", " bf16 paper"}) {
      const AttentionProblem p = make_problem(text + recipe);
      const bool paper = p.c.recipe.scheme == Scheme::paper;
      const double gate = paper ? 0.08 : 0.035;
      EXPECT_TRUE(
          accurate(run(impl(), p), exact(p), {.o = 0.03, .dq = gate, .dk = gate, .dv = gate}, p));
    }
  }
}

TEST_P(HeadDims, ElementTypes) {
  for (const char* dtype : {"f32", "bf16", "f16"}) {
    const AttentionProblem p = make_problem(std::string("h2 n200 d64 causal ") + dtype);
    const Results got = run(impl(), p);
    EXPECT_TRUE(accurate(got, exact(p), {.o = 0.03, .dq = 0.03, .dk = 0.04, .dv = 0.03}, p));
    // Lifted, what is left is the rounding of the outputs to their type (and of O on its way to D).
    const AttentionProblem lifted =
        make_problem(std::string("h2 n200 d64 causal lift=S,O,S',dV,dP,dQ,dK ") + dtype);
    const double eps = p.c.dtype == Dtype::f32 ? 3e-6 : p.c.dtype == Dtype::bf16 ? 4e-3 : 5e-4;
    EXPECT_TRUE(accurate(run(impl(), lifted), exact(lifted),
                         {.o = eps, .dq = eps, .dk = eps, .dv = eps}, lifted));
  }
}

TEST_P(HeadDims, LogitScale) {
  for (float scale : {0.03f, 0.5f, -0.125f, -0.4f}) {
    AttentionProblem p = make_problem("h2 n200 d64 f32 causal");
    p.scale = scale;
    EXPECT_TRUE(
        accurate(run(impl(), p), exact(p), {.o = 0.06, .dq = 0.2, .dk = 0.2, .dv = 0.06}, p));
    p.c.recipe.high_precision = kMatmulAll;
    EXPECT_TRUE(
        accurate(run(impl(), p), exact(p), {.o = 1e-5, .dq = 1e-5, .dk = 1e-5, .dv = 1e-5}, p));
  }
  AttentionProblem given = make_problem("h2 n100 d64 f32"), left_out = given;
  given.scale = 0.125f;  // 1/sqrt(64)
  EXPECT_EQ(first_difference(run(impl(), given), run(impl(), left_out)), "");
}

SAGE_FOR_ALL_IMPLEMENTATIONS(HeadDims);

}  // namespace
}  // namespace sagebwd::testing
