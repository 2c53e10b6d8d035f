// SPDX-License-Identifier: Apache-2.0
// Accuracy of the GPU: on lossless inputs, against exact attention, against the gradient of the
// quantised forward, and over many problems. The tests under tests/cpp/attention have the same
// budgets and give the reasons for them.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstdio>

#include "base/hash.h"
#include "device_case.h"
#include "numerics/octaves.h"
#include "numerics/rotate.h"
#include "ref/recipe_inputs.h"
#include "trace/metrics.h"
#include "trace/published.h"

namespace sagebwd::gpu {
namespace {

using trace::InputKind;

trace::ErrorStats stats(const std::vector<float>& got, const std::vector<float>& want, int64_t d) {
  trace::ErrorStats e;
  const std::vector<double> reference(want.begin(), want.end());
  const auto rows = static_cast<int64_t>(got.size()) / d;
  for (int64_t row = 0; row < rows; ++row)
    e.add_row(got.data() + row * d, reference.data() + row * d, d, row);
  e.finish();
  return e;
}

struct Compared {
  trace::ErrorStats o, dq, dk, dv;
};
Compared compare(const DeviceCase& dc, const Results& got, const Results& want) {
  const int64_t d = dc.c.d;
  const Compared e{stats(got.o, want.o, d), stats(got.dq, want.dq, d), stats(got.dk, want.dk, d),
                   stats(got.dv, want.dv, d)};
  std::printf("exact  %-60s o %.4f dq %.4f dk %.4f dv %.4f\n", dc.c.to_string().c_str(), e.o.rel_l2,
              e.dq.rel_l2, e.dk.rel_l2, e.dv.rel_l2);
  return e;
}

/// Divides every vector by its RMS, as a model with QK-norm does.
void normalise(std::vector<float>& x, const spec::AttnCase& c) {
  for (size_t row = 0; row < x.size(); row += static_cast<size_t>(c.d)) {
    double square = 0;
    for (int64_t i = 0; i < c.d; ++i) square += static_cast<double>(x[row + i]) * x[row + i];
    const auto by = static_cast<float>(1 / std::sqrt(square / static_cast<double>(c.d)));
    for (int64_t i = 0; i < c.d; ++i) x[row + i] = rounded(x[row + i] * by, c.dtype);
  }
}

// --- inputs that INT8 represents without loss: only indexing can go wrong

void expect_equal(const char* name, const std::vector<float>& got, const std::vector<float>& want) {
  constexpr float kUlp = 0x1p-8f;  // of a bf16 output
  // A tile adds up to 127·127 units, and the start of its sum costs a few (tile/codes.cuh).
  constexpr float kStart = 4.0f / (127 * 127);
  ASSERT_EQ(got.size(), want.size());
  float largest = 0;
  for (const float x : want) largest = std::max(largest, std::fabs(x));
  for (size_t i = 0; i < got.size(); ++i)
    ASSERT_LE(std::fabs(got[i] - want[i]), kUlp * std::fabs(want[i]) + kStart * largest + 1e-3f)
        << name << "[" << i << "]: got " << got[i] << ", expected " << want[i];
}

/// Keys are ±127 along one channel each, in pairs of opposite sign, so that means are zero; a query
/// is one of them. P is one-hot, and only dLSE makes dS, which is exact: dQ = c·dLSE·k.
TEST(GpuLossless, OneHotProbabilities) {
  NEED_DEVICE();
  for (const char* text : {"b2 h4 hk2 nq100 nk128 d64 bf16", "h2 nq150 nk128 d128 bf16",
                           "h2 n128 d64 bf16 paper lift=O"}) {
    DeviceCase dc(text);
    dc.dlse = true;
    SCOPED_TRACE(text);
    CaseInputs in = make_case_inputs(dc);
    const spec::AttnCase& c = dc.c;
    auto draw = [n = uint64_t{0}](int64_t below) mutable {
      return static_cast<int64_t>(hash64({31, n++}) % static_cast<uint64_t>(below));
    };
    for (auto* x : {&in.x.q, &in.x.k, &in.x.v, &in.x.dout}) std::fill(x->begin(), x->end(), 0.0f);
    const auto point = [&](std::vector<float>& x, int64_t row, int64_t key) {
      x[static_cast<size_t>(row * c.d + key / 2 % c.d)] = key % 2 == 0 ? 127.0f : -127.0f;
    };
    for (int64_t row = 0; row < c.b * c.hk * c.nk; ++row) {
      point(in.x.k, row, row % c.nk);
      if (row % 2 != 0) continue;
      const auto at = static_cast<size_t>(row * c.d + draw(c.d));
      in.x.v[at] = draw(2) == 0 ? 8.0f : -8.0f;
      in.x.v[at + static_cast<size_t>(c.d)] = -in.x.v[at];
    }
    for (int64_t row = 0; row < c.b * c.h * c.nq; ++row) {
      point(in.x.q, row, draw(c.nk));
      in.x.dout[static_cast<size_t>(row * c.d + draw(c.d))] = draw(2) == 0 ? 127.0f : -127.0f;
      in.dlse[static_cast<size_t>(row)] = draw(2) == 0 ? 16.0f : -16.0f;
    }
    const Results got = run_on_device(dc, in), want = run_exact(dc, in);
    expect_equal("O", got.o, want.o);
    expect_equal("dQ", got.dq, want.dq);
    expect_equal("dK", got.dk, want.dk);
    expect_equal("dV", got.dv, want.dv);
    // Logits near 2000. Where the start of the sums stays on the scores, it rounds them: 1.2e-3 was
    // measured.
    EXPECT_LE(largest_difference(got.lse, want.lse),
              c.recipe.scheme == Scheme::paper ? 1e-3f : 2.5e-3f);
  }
}

// --- against exact attention

TEST(GpuAccuracy, AgainstExact) {
  NEED_DEVICE();
  for (const char* text : {"h4 n512 d64", "h4 n1024 d64", "h4 n2048 d64 causal", "h4 n1024 d128",
                           "h4 n2048 d128 causal", "h4 n1024 d64 f16 causal", "h4 n1024 d128 f16",
                           "h4 n799 d64", "h4 n1023 d128 causal", "h4 n1025 d64 causal",
                           "h1 n4097 d64 causal", "h4 n1025 d128 causal"})
    for (const bool qk_norm : {false, true}) {
      const DeviceCase dc(text);
      if (qk_norm && dc.c.nq > 1024) continue;
      SCOPED_TRACE(dc.c.to_string() + (qk_norm ? " with QK-norm" : ""));
      CaseInputs in = make_case_inputs(dc);
      if (qk_norm) normalise(in.x.q, dc.c), normalise(in.x.k, dc.c);
      const Results got = run_on_device(dc, in), want = run_exact(dc, in);
      const Compared e = compare(dc, got, want);
      EXPECT_LE(e.o.rel_l2, 0.03);
      EXPECT_LE(e.dq.rel_l2, 0.03);
      EXPECT_LE(e.dk.rel_l2, 0.04);
      EXPECT_LE(e.dv.rel_l2, 0.03);
      for (const auto* x : {&e.o, &e.dq, &e.dk, &e.dv}) EXPECT_GE(x->cosine, 0.999);
      EXPECT_LE(largest_difference(got.lse, want.lse), 0.05);
    }
}

// --- many keys: sums over many tiles

TEST(GpuAccuracy, ManyKeys) {
  NEED_DEVICE();
  // cuda-sm90 adds dQ up in half precision over 32768 keys, and in FP32 over more.
  for (const char* text : {"h1 nq192 nk32768 d128", "h1 nq192 nk32768 d64", "h1 nq192 nk33000 d64"})
    for (const InputKind kind : {InputKind::gaussian, InputKind::sink}) {
      DeviceCase dc(text);
      dc.kind = kind;
      SCOPED_TRACE(dc.c.to_string() + " " + trace::input_name(kind));
      const CaseInputs in = make_case_inputs(dc);
      const Compared e = compare(dc, run_on_device(dc, in), run_exact(dc, in));
      EXPECT_LE(e.dq.rel_l2, kind == InputKind::sink ? 0.05 : 0.03);
      EXPECT_LE(e.dk.rel_l2, 0.05);
    }
}

// --- queries whose dO is far smaller than that of their neighbours

TEST(GpuAccuracy, LittleGradientBesideMuch) {
  NEED_DEVICE();
  for (const char* text :
       {"h2 n1024 d64", "h2 n1024 d128 causal", "h1 n4096 d128", "h2 n1024 d64 causal"}) {
    const DeviceCase dc(text);
    SCOPED_TRACE(text);
    CaseInputs in = make_case_inputs(dc);
    const auto d = static_cast<size_t>(dc.c.d);
    constexpr size_t kKinds = 5;  // dO times 1, 1/10, … 1/10000
    const auto part = [&](const std::vector<float>& x, size_t kind) {
      std::vector<float> rows;
      for (size_t at = kind * d; at < x.size(); at += kKinds * d)
        rows.insert(rows.end(), x.begin() + static_cast<std::ptrdiff_t>(at),
                    x.begin() + static_cast<std::ptrdiff_t>(at + d));
      return rows;
    };
    for (size_t i = 0; i < in.x.dout.size(); ++i)
      in.x.dout[i] =
          rounded(in.x.dout[i] * std::pow(10.0f, -static_cast<float>(i / d % kKinds)), dc.c.dtype);
    const Results got = run_on_device(dc, in), want = run_exact(dc, in);
    for (size_t kind = 0; kind < kKinds; ++kind)
      EXPECT_LE(stats(part(got.dq, kind), part(want.dq, kind), dc.c.d).rel_l2, 0.03)
          << "dO times 10^-" << kind;
  }
}

// From tile to tile dO becomes eight times as large or as small, and a key sees few tiles: dK of
// every 64 keys has a magnitude of its own.
TEST(GpuAccuracy, GradientsThatGrowAndShrink) {
  NEED_DEVICE();
  for (const char* text : {"h2 n1024 d64 window=100,0", "h2 n1024 d128 window=100,0"})
    for (bool grows : {false, true}) {
      const DeviceCase dc(text);
      if (!device_candidate(dc, true).supported) continue;
      SCOPED_TRACE(dc.c.to_string() + (grows ? " grows" : " shrinks"));
      CaseInputs in = make_case_inputs(dc);
      const auto n = static_cast<size_t>(dc.c.nq), d = static_cast<size_t>(dc.c.d);
      for (size_t i = 0; i < in.x.dout.size(); ++i) {
        const auto tile = static_cast<float>(i / d % n / 64);
        in.x.dout[i] =
            rounded(in.x.dout[i] * std::pow(8.0f, grows ? tile - 16.0f : -tile), dc.c.dtype);
      }
      const Results got = run_on_device(dc, in), want = run_exact(dc, in);
      const auto keys = [&](const std::vector<float>& x, size_t at) {
        return std::vector<float>(x.begin() + static_cast<std::ptrdiff_t>(at),
                                  x.begin() + static_cast<std::ptrdiff_t>(at + 64 * d));
      };
      for (size_t at = 0; at < got.dk.size(); at += 64 * d)
        EXPECT_LE(stats(keys(got.dk, at), keys(want.dk, at), dc.c.d).rel_l2, 0.04) << at / d;
    }
}

// --- against the straight-through gradient of the quantised forward

/// q, k and v become what their codes stand for: Q and K turned back, K without its mean, which
/// softmax does not see. In `vectorwise` K and V have the centres of their octaves.
void decode(const ref::RecipeInputs& in, int64_t n, int64_t d, float* q, float* k, float* v) {
  for (int64_t i = 0; i < n; ++i) {
    const auto size = static_cast<size_t>(i);
    for (int64_t c = 0; c < d; ++c) {
      const auto at = static_cast<size_t>(i * d + c);
      q[at] = static_cast<float>(in.q8[at]) * in.q_scale[size];
      k[at] = static_cast<float>(in.k8[at]) * in.k_scale[size];
      v[at] = static_cast<float>(in.v8[at]) * in.v_scale[size];
      if (in.centre8.empty()) continue;
      const auto octave = static_cast<size_t>(numerics::octave_of_block(i / kKeysPerScale)),
                 of_octave = octave * static_cast<size_t>(d) + static_cast<size_t>(c);
      k[at] += in.centre_scale[octave] * static_cast<float>(in.centre8[of_octave]);
      v[at] += in.v_centre_scale[octave] * static_cast<float>(in.v_centre8[of_octave]);
    }
    numerics::rotate_back(q + i * d, static_cast<int>(d));
    numerics::rotate_back(k + i * d, static_cast<int>(d));
  }
}

TEST(GpuAccuracy, AgainstTheGradientOfTheQuantisedForward) {
  NEED_DEVICE();
  for (const char* text : {"h4 n512 d64", "h4 n512 d64 causal", "h4 n512 d128"}) {
    const DeviceCase dc(text);
    SCOPED_TRACE(text);
    const CaseInputs in = make_case_inputs(dc);
    CaseInputs quantised = in;
    const int64_t d = dc.c.d, n = dc.c.nk;
    for (int64_t head = 0; head < dc.c.h; ++head) {
      const int64_t first = head * n * d;
      ref::RecipeHead x;
      x.nq = x.nk = n, x.d = d, x.scale = dc.c.logit_scale(), x.recipe = dc.c.recipe;
      x.recipe.tile_q = 64, x.recipe.tile_k = 128;
      x.q = &in.x.q[static_cast<size_t>(first)], x.k = &in.x.k[static_cast<size_t>(first)];
      x.v = &in.x.v[static_cast<size_t>(first)];
      decode(ref::make_operands(x).inputs, n, d, &quantised.x.q[static_cast<size_t>(first)],
             &quantised.x.k[static_cast<size_t>(first)],
             &quantised.x.v[static_cast<size_t>(first)]);
    }
    const Compared e = compare(dc, run_on_device(dc, in), run_exact(dc, quantised));
    EXPECT_LE(e.o.rel_l2, 0.02);
    // Measured: 0.0155 with tiles of 64 keys, 0.0185 with tiles of 128.
    EXPECT_LE(e.dq.rel_l2, device_candidate(dc, true).tile_k == 64 ? 0.017 : 0.020);
    EXPECT_LE(e.dk.rel_l2, 0.025);
    EXPECT_LE(e.dv.rel_l2, 0.025);
  }
}

// --- bias over many problems, and rows left behind

/// tests/cpp/attention/bias_test.cpp says what these budgets catch.
double bias_budget(InputKind kind) {
  if (kind == InputKind::gaussian) return 0.001;
  return kind == InputKind::sink ? 0.002 : 0.0025;
}

TEST(GpuAccuracy, BiasIsSmallAndNoRowIsLeftBehind) {
  NEED_DEVICE();
  for (const char* text : {"b4 h8 n512 d64", "b4 h8 n512 d64 causal", "b4 h8 n512 d128 causal"})
    for (const InputKind kind : {InputKind::gaussian, InputKind::sink, InputKind::long_rows}) {
      DeviceCase dc(text);
      dc.kind = kind;
      SCOPED_TRACE(dc.c.to_string() + " " + trace::input_name(kind));
      const CaseInputs in = make_case_inputs(dc);
      const Compared e = compare(dc, run_on_device(dc, in), run_exact(dc, in));
      for (const auto* x : {&e.o, &e.dq, &e.dk, &e.dv})
        EXPECT_LE(std::fabs(x->projection), bias_budget(kind));
      EXPECT_LE(e.dq.bad_row_fraction, 0.005);
      EXPECT_LE(e.dk.bad_row_fraction, 0.005);
    }
}

// --- the published table over the deviation of Q and K

TEST(GpuAccuracy, PublishedTable) {
  NEED_DEVICE();
  for (const trace::PublishedErrors& row : trace::kPublished) {
    DeviceCase dc("h4 n2048 d64"), paper("h4 n2048 d64 paper");
    dc.sigma = paper.sigma = row.sigma;
    SCOPED_TRACE(row.sigma);
    const CaseInputs in = make_case_inputs(dc);
    const Results want = run_exact(dc, in);
    const Compared ours = compare(dc, run_on_device(dc, in), want),
                   theirs = compare(paper, run_on_device(paper, in), want);
    // At deviation 1 dQ has .0197 by the oracle where the published figure is .0184, because K is
    // rounded twice for it, and .0222 if 128 keys share a scale of dS. dK has .0181 if 64 queries
    // share one of dS, and .0210 with 128; dV has .0123 if 64 share one of P, and .0131 with 128.
    const auto tiles = device_candidate(dc, true);
    const double dq_at_one = tiles.tile_k == 64 ? 1.1 * 0.0188 : 0.0235,
                 dv_at_one = tiles.tile_q == 64 ? 0.0139 : 0.0147;
    EXPECT_EQ(tiles.dk_q, 64);
    EXPECT_LE(ours.dq.rel_l2, row.sigma == 1 ? dq_at_one : row.dq);
    EXPECT_LE(ours.dk.rel_l2, row.sigma == 1 ? 0.0200 : row.dk);
    if (row.sigma == 1) {
      EXPECT_LE(ours.dv.rel_l2, dv_at_one);
    }
    // One scale per tile cannot give the published figures at deviation 1.
    EXPECT_LE(theirs.dq.rel_l2, row.sigma == 1 ? 0.065 : 1.1 * row.dq);
    EXPECT_LE(theirs.dk.rel_l2, row.sigma == 1 ? 0.065 : 1.1 * row.dk);
  }
}

}  // namespace
}  // namespace sagebwd::gpu
