// SPDX-License-Identifier: Apache-2.0
// Soft capping: a logit x becomes cap·tanh(x/cap). All problems have a large mean key, which
// K-smoothing takes out of the logits: softmax does not notice that, but a cap does.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <string>
#include <vector>

#include "support/attention_problem.h"
#include "support/compare.h"
#include "support/implementations.h"

namespace sagebwd::testing {
namespace {

const char* const kLiftAll = " lift=S,O,S',dV,dP,dQ,dK";

AttentionProblem capped_problem(const std::string& text, float offset = 3.0f, double sigma = 1.0) {
  AttentionProblem p = make_problem(text, trace::InputKind::gaussian, sigma);
  for (size_t i = 0; i < p.in.k.size(); ++i)
    p.in.k[i] += offset * static_cast<float>(static_cast<int64_t>(i) % p.c.d % 3 - 1);
  p.round_inputs();
  p.make_lists();
  return p;
}

class Softcap : public PerImplementation {};

TEST_P(Softcap, OfLiftedMatmulsIsExact) {
  for (const char* text :
       {"h2 n200 d64 f32 causal softcap=2", "h4 hk2 nq150 nk250 d64 f32 softcap=20",
        "h2 n200 d64 f32 paper window=40,10 softcap=50", "n130 d40 f32 softcap=0.3"}) {
    AttentionProblem p = capped_problem(std::string(text) + kLiftAll);
    p.dlse = random_rows(p, 7);
    const Results got = run(impl(), p);
    const Exact want = exact(p);
    EXPECT_TRUE(accurate(got, want, {.o = 2e-5, .dq = 3e-5, .dk = 3e-5, .dv = 2e-5}, p));
    EXPECT_TRUE(elementwise("LSE", got.lse, want.lse, p.row_shape(), 2e-5, 1e-6, p));
    EXPECT_TRUE(elementwise("max_logit", got.max_logit, want.max_logit, {1, 1, p.c.b, p.c.h}, 2e-5,
                            1e-6, p));
  }
}

TEST_P(Softcap, IsAsAccurateAsNoCap) {
  for (const char* text : {"h2 n300 d64 bf16 causal softcap=5", "h4 hk2 nq150 nk250 d64 softcap=20",
                           "h2 n300 d128 f16 softcap=50", "h2 n300 d64 f32 paper softcap=10"}) {
    AttentionProblem p = capped_problem(text);
    const double gate = p.c.recipe.scheme == Scheme::paper ? 0.08 : 0.04;
    EXPECT_TRUE(
        accurate(run(impl(), p), exact(p), {.o = 0.03, .dq = gate, .dk = gate, .dv = gate}, p));
  }
}

/// Without the row sums of dS the mean key would be missing in dQ: this large one shows it.
TEST_P(Softcap, GivesTheMeanKeyBackToQueries) {
  for (const char* text : {"h2 n200 d64 f32 softcap=8", "h2 n200 d64 f32 softcap=8 rotate=off",
                           "h2 n200 d64 f32 softcap=8 paper smooth_q=on"}) {
    AttentionProblem p = capped_problem(text, 10.0f);
    const double gate = p.c.recipe.scheme == Scheme::paper ? 0.08 : 0.04;
    EXPECT_TRUE(close("dQ", run(impl(), p).dq, exact(p).dq, p.q_shape(), {.rel_l2 = gate}, p));
  }
}

TEST_P(Softcap, ThatIsHugeIsNone) {
  for (const char* text : {"h2 n200 d64 f32 causal", "h2 n200 d64 bf16", "n100 d64 f32 paper"}) {
    const AttentionProblem none = capped_problem(text);
    for (const char* cap : {" softcap=1e6", " softcap=1e15"}) {
      const AttentionProblem huge = capped_problem(std::string(text) + cap);
      // Codes of P or dS may round the other way.
      EXPECT_TRUE(agrees(run(impl(), huge), run(impl(), none), {2e-3, 1e-5, 2e-5}, huge));
    }
  }
}

TEST_P(Softcap, ThatIsTinyMakesTheMean) {
  const AttentionProblem p = capped_problem("h2 n100 d64 f32 softcap=1e-6 smooth_k=off", 0.0f);
  const Results got = run(impl(), p);
  const Exact want = exact(p);
  EXPECT_TRUE(close("o", got.o, want.o, p.q_shape(), {.rel_l2 = 0.02}, p));
  EXPECT_TRUE(elementwise("LSE", got.lse, want.lse, p.row_shape(), 1e-5, 1e-6, p));
  for (float x : got.lse) EXPECT_NEAR(x, std::log(100.0), 1e-4);
  // All logits are far in the flat part. What is left of dQ is the error of D, which the cap takes
  // whole here, times the mean key: 2.6e-4.
  for (float x : got.dq) ASSERT_LT(std::fabs(x), 4e-4f);
  for (float x : got.dk) EXPECT_LT(std::fabs(x), 1e-6f);
}

TEST_P(Softcap, KeepsItsSlopeInSaturation) {
  // Logits of ±40 at a cap of 4: slopes of 1e-8 are all that dQ and dK are made of.
  AttentionProblem p =
      capped_problem(std::string("n64 d64 f32 softcap=4 smooth_k=off") + kLiftAll, 0.0f);
  for (size_t i = 0; i < p.in.q.size(); ++i) p.in.q[i] = i % 64 == 0 ? 8.0f : 0.0f;
  for (size_t i = 0; i < p.in.k.size(); ++i)
    p.in.k[i] = i % 64 == 0 ? (i / 64 % 2 == 0 ? 40.0f : -36.0f) : 0.01f * p.in.k[i];
  EXPECT_TRUE(
      accurate(run(impl(), p), exact(p), {.o = 2e-5, .dq = 1e-4, .dk = 1e-4, .dv = 2e-5}, p));
}

TEST_P(Softcap, WorksWithDocumentsListsAndPartsOfTheKeys) {
  const std::string lists = "h2 n384 d64 bf16 softcap=6 keep=0.5 blocks=128x64";
  EXPECT_TRUE(accurate(run(impl(), capped_problem(lists)), exact(capped_problem(lists)),
                       {.o = 0.04, .dq = 0.05, .dk = 0.05, .dv = 0.04}, capped_problem(lists)));
  AttentionProblem packed = capped_problem("h2 n256 d64 f32 causal softcap=6");
  packed.cu_q = packed.cu_k = {0, 100, 100, 256};
  EXPECT_TRUE(accurate(run(impl(), packed), exact(packed),
                       {.o = 0.03, .dq = 0.05, .dk = 0.05, .dv = 0.03}, packed));
  // Two parts of the keys, each with O and LSE of all: their dQ add up.
  const AttentionProblem all = capped_problem(std::string("n128 d64 f32 softcap=6") + kLiftAll);
  const Exact want = exact(all);
  const std::vector<float> o(want.o.begin(), want.o.end()), lse(want.lse.begin(), want.lse.end());
  std::vector<double> dq(want.dq.size(), 0.0);
  for (int64_t part = 0; part < 2; ++part) {
    AttentionProblem half = all;
    half.c.nk = 64, half.partial_kv = true;
    for (auto* x : {&half.in.k, &half.in.v})
      *x = std::vector<float>(x->begin() + part * 64 * 64, x->begin() + (part + 1) * 64 * 64);
    const Results got = run(impl(), half, {.o = &o, .lse = &lse});
    for (size_t i = 0; i < dq.size(); ++i) dq[i] += static_cast<double>(got.dq[i]);
  }
  EXPECT_TRUE(close("dQ", std::vector<float>(dq.begin(), dq.end()), want.dq, all.q_shape(),
                    {.rel_l2 = 3e-5}, all));
}

TEST_P(Softcap, KeepsNanWhereItIs) {
  for (const char* text : {"n100 d64 f32 causal softcap=5", "n100 d64 bf16 causal softcap=5"}) {
    AttentionProblem p = capped_problem(text);
    p.in.q[7 * 64 + 3] = std::numeric_limits<float>::quiet_NaN();
    p.in.k[90 * 64 + 1] = std::numeric_limits<float>::infinity();
    const Results got = run(impl(), p);
    for (int64_t i = 0; i < 100; ++i)
      EXPECT_EQ(std::isnan(got.lse[i]), i == 7 || i >= 90) << i << " of " << p.describe();
    EXPECT_TRUE(std::isnan(got.max_logit[0]));
  }
}

SAGE_FOR_ALL_IMPLEMENTATIONS(Softcap);

/// The micro-kernels themselves: one key, so that the largest logit is the capped one.
class CappedTiles : public PerKernelTable {};

TEST_P(CappedTiles, LogitAndSlopeHaveSixDigits) {
  constexpr int kQueries = 64, kKeys = 4;
  for (float cap : {1e-6f, 0.5f, 30.0f, 1e6f}) {
    double worst_logit = 0, worst_slope = 0;
    for (int sweep = 0; sweep < 64; ++sweep) {
      std::vector<float> x(kQueries), s(kQueries * kKeys), ones(kQueries, 1.0f),
          zeros(kQueries, 0.0f), m(kQueries, -std::numeric_limits<float>::infinity()), top(m),
          l(kQueries), alpha(kQueries), beta(kQueries);
      for (int i = 0; i < kQueries; ++i)  // |x/cap| from 1e-4 to 40, in log2 units
        x[i] = (i % 2 == 0 ? 1.0f : -1.0f) * cap * 1.4426950f * 1e-4f *
               std::pow(4e5f, static_cast<float>(i * 64 + sweep) / (64 * 64));
      for (int j = 0; j < kKeys; ++j) std::copy(x.begin(), x.end(), s.begin() + j * kQueries);
      kernels().forward_tile({.tile_q = kQueries,
                              .tile_k = kKeys,
                              .s = s.data(),
                              .s_is_float = true,
                              .k_scale = ones.data(),
                              .logit_factor = ones.data(),
                              .bias = nullptr,
                              .shift = zeros.data(),
                              .cap = numerics::softcap_of(cap),
                              .begin = nullptr,
                              .end = nullptr,
                              .v_log2 = zeros.data(),
                              .v_inverse = ones.data(),
                              .m = m.data(),
                              .l = l.data(),
                              .logit_max = top.data(),
                              .alpha = alpha.data(),
                              .beta = beta.data(),
                              .p_float = true,
                              .p8 = nullptr,
                              .p_levels = 255.0f,
                              .dither_query = nullptr,
                              .dither_u = 0.0f});
      // dS = P·(dP − D)·slope with P = dP = 1 and D = 0.
      std::vector<float> dp(kQueries * kKeys, 1.0f), query_scale(kQueries);
      std::vector<int32_t> key_max(2 * kKeys * 16);
      for (int j = 0; j < kKeys; ++j) std::copy(x.begin(), x.end(), s.begin() + j * kQueries);
      kernels().backward_tile({.tile_q = kQueries,
                               .tile_k = kKeys,
                               .s = s.data(),
                               .s_is_float = true,
                               .dp = dp.data(),
                               .v_scale = ones.data(),
                               .k_scale = ones.data(),
                               .logit_factor = ones.data(),
                               .bias = nullptr,
                               .shift = zeros.data(),
                               .cap = numerics::softcap_of(cap),
                               .begin = nullptr,
                               .end = nullptr,
                               .lse2 = top.data(),
                               .delta = zeros.data(),
                               .q_scale = ones.data(),
                               .do_scale = ones.data(),
                               .k_fold = ones.data(),
                               .per_vector = true,
                               .dv_float = true,
                               .dq_float = true,
                               .dk_float = true,
                               .query_sum = nullptr,
                               .key_sum = nullptr,
                               .key_max = key_max.data(),
                               .p8 = nullptr,
                               .ds8_key = nullptr,
                               .ds8_query = nullptr,
                               .p_scale = nullptr,
                               .ds_key_scale = nullptr,
                               .ds_query_scale = query_scale.data(),
                               .ds_query_start = nullptr,
                               .dither_p = {},
                               .dither_ds_query = {},
                               .dither_ds_key = {},
                               .dither_query = nullptr,
                               .p_levels = 255.0f});
      for (int i = 0; i < kQueries; ++i) {
        const double wide = static_cast<double>(cap) / numerics::kLn2,
                     u = static_cast<double>(x[i]) / wide, y = wide * std::tanh(u),
                     slope = 1 / (std::cosh(u) * std::cosh(u));
        worst_logit = std::max(worst_logit, std::fabs(static_cast<double>(top[i]) / y - 1));
        // Where e^(-2|u|) is no normal number any more, nothing is left of the gradient.
        if (std::fabs(u) < 40)
          worst_slope = std::max(worst_slope, std::fabs(static_cast<double>(dp[i]) / slope - 1) /
                                                  (1 + 2 * std::fabs(u)));
      }
    }
    RecordProperty("logit", std::to_string(worst_logit));
    EXPECT_LT(worst_logit, 5e-7) << cap;
    EXPECT_LT(worst_slope, 5e-7) << cap;
  }
}

SAGE_FOR_KERNEL_TABLES(CappedTiles);

}  // namespace
}  // namespace sagebwd::testing
