// SPDX-License-Identifier: Apache-2.0
// The recipe oracle step by step: what each switch does, what the taps show, and inputs that
// quantise without loss.
#include <gtest/gtest.h>

#include <bit>
#include <limits>

#include "numerics/quantize.h"
#include "ref/random_head.h"

namespace sagebwd {
namespace {

using testing::ExactAnswer;
using testing::paper_recipe;
using testing::RandomHead;
using testing::RecipeAnswer;
using testing::rel_l2;
using testing::vectorwise_recipe;

constexpr float kInf = std::numeric_limits<float>::infinity();

/// Tests that hold for every scheme.
class RecipeScheme : public ::testing::TestWithParam<Scheme> {
 protected:
  static Recipe recipe(uint32_t lifted = 0) {
    Recipe r = GetParam() == Scheme::paper ? paper_recipe() : vectorwise_recipe();
    r.high_precision = lifted;
    return r;
  }
};
INSTANTIATE_TEST_SUITE_P(, RecipeScheme, ::testing::Values(Scheme::paper, Scheme::vectorwise),
                         [](const auto& scheme) { return scheme_name(scheme.param); });

void expect_exact(const RandomHead& h, const Recipe& recipe) {
  const RecipeAnswer got(h, recipe);
  const ExactAnswer want(h);
  EXPECT_LT(rel_l2(got.forward.o, want.result.o), 1e-5);
  EXPECT_LT(rel_l2(got.backward.dq, want.result.dq), 1e-5);
  EXPECT_LT(rel_l2(got.backward.dk, want.result.dk), 1e-5);
  EXPECT_LT(rel_l2(got.backward.dv, want.result.dv), 1e-5);
  EXPECT_LT(rel_l2(got.backward.delta, want.result.delta), 1e-5);
  for (int64_t i = 0; i < h.nq; ++i) {
    if (got.forward.lse[i] == -kInf && want.result.lse[i] == -kInf) continue;
    EXPECT_NEAR(static_cast<double>(got.forward.lse[i]), want.result.lse[i], 2e-6) << i;
  }
  EXPECT_NEAR(static_cast<double>(got.forward.max_logit), want.result.max_logit, 5e-6);
}

TEST_P(RecipeScheme, AllMatmulsLiftedIsExact) {
  expect_exact(RandomHead(300, 300, 64), recipe(kMatmulAll));
  expect_exact(RandomHead(300, 300, 64).causal(), recipe(kMatmulAll));
  expect_exact(RandomHead(130, 257, 64).causal(), recipe(kMatmulAll));
  expect_exact(RandomHead(257, 130, 64).causal(), recipe(kMatmulAll));
  expect_exact(RandomHead(200, 200, 40).window(30, 9), recipe(kMatmulAll));
  RandomHead h = RandomHead(150, 210, 64).causal();
  h.dlse = testing::normal_values(h.nq, 1.0, 77);
  expect_exact(h, recipe(kMatmulAll));
}

TEST_P(RecipeScheme, SmoothingIsExact) {
  for (int bits = 0; bits < (GetParam() == Scheme::paper ? 4 : 2); ++bits) {
    Recipe r = recipe(kMatmulAll);
    r.smooth_k = (bits & 1) != 0, r.smooth_q = (bits & 2) != 0;
    expect_exact(RandomHead(150, 150, 32).causal(), r);
  }
}

/// Only the matmul left in INT8 has an error: it sits in the outputs downstream of it and nowhere
/// else.
TEST_P(RecipeScheme, EachMatmulQuantisesItsOwnOutputs) {
  const RandomHead h(256, 256, 64);
  const ExactAnswer want(h);
  const struct {
    Matmul alone;
    bool o, dq, dk, dv;
  } cases[] = {
      {kMatmulS, true, true, true, true},   // O and LSE, hence everything
      {kMatmulO, true, true, true, false},  // D
      {kMatmulSRecompute, false, true, true, true}, {kMatmulDV, false, false, false, true},
      {kMatmulDP, false, false, false, false},  // never INT8
      {kMatmulDQ, false, true, false, false},       {kMatmulDK, false, false, true, false}};
  for (const auto& c : cases) {
    const Recipe r = recipe(kMatmulAll & ~static_cast<uint32_t>(c.alone));
    const RecipeAnswer got(h, r);
    const auto check = [&](const std::vector<float>& x, const std::vector<double>& y,
                           bool quantised) {
      const double error = rel_l2(x, y);
      EXPECT_LT(error, quantised ? 0.07 : 1e-5) << matmul_name(c.alone);
      EXPECT_GT(error, quantised ? 1e-4 : 0.0) << matmul_name(c.alone);
    };
    check(got.forward.o, want.result.o, c.o);
    check(got.backward.dq, want.result.dq, c.dq);
    check(got.backward.dk, want.result.dk, c.dk);
    check(got.backward.dv, want.result.dv, c.dv);
  }
}

TEST_P(RecipeScheme, BackwardSeesTheForwardsCodes) {
  const RecipeAnswer a(RandomHead(200, 170, 64, 3.0), recipe());
  EXPECT_EQ(a.forward.inputs.q8, a.backward.inputs.q8);
  EXPECT_EQ(a.forward.inputs.k8, a.backward.inputs.k8);
  EXPECT_EQ(a.forward.inputs.q_scale, a.backward.inputs.q_scale);
  EXPECT_EQ(a.forward.inputs.k_scale, a.backward.inputs.k_scale);
}

/// A scale covers what the scheme says: a block of tokens, or a token.
TEST_P(RecipeScheme, InputScalesCoverBlocksOrTokens) {
  RandomHead h(200, 200, 32);
  Recipe r = recipe();
  r.smooth_k = r.rotate = false;
  const RecipeAnswer a(h, r);
  const bool paper = GetParam() == Scheme::paper;
  const auto check = [&](const std::vector<float>& x, const std::vector<int8_t>& codes,
                         const std::vector<float>& scales, int64_t tokens) {
    for (int64_t begin = 0; begin < 200; begin += tokens) {
      const int64_t end = std::min<int64_t>(begin + tokens, 200);
      float amax = 0;
      for (int64_t n = begin * 32; n < end * 32; ++n) amax = std::max(amax, std::fabs(x[n]));
      for (int64_t i = begin; i < end; ++i) {
        ASSERT_EQ(scales[i], amax / 127.0f) << i;
        for (int64_t n = i * 32; n < (i + 1) * 32; ++n)
          ASSERT_NEAR(static_cast<float>(codes[n]) * scales[i], x[n], 0.5001f * scales[i]);
      }
    }
  };
  check(h.q, a.forward.inputs.q8, a.forward.inputs.q_scale, paper ? r.tile_q : 1);
  if (paper) check(h.k, a.forward.inputs.k8, a.forward.inputs.k_scale, r.tile_k);
  check(h.v, a.forward.inputs.v8, a.forward.inputs.v_scale, paper ? r.tile_k : 1);
  check(h.dout, a.backward.do8, a.backward.do_scale, paper ? r.tile_q : 1);
}

/// The tap's codes, scales undone, are within half a step of the values; tiles cover every visible
/// entry once.
TEST_P(RecipeScheme, TapShowsValuesAndTheirCodes) {
  const RandomHead h = RandomHead(150, 200, 64).causal();
  const ref::RecipeHead head = h.recipe(recipe());
  std::vector<int> seen_forward(150 * 200, 0), seen_backward(seen_forward);
  std::vector<float> s2(150 * 200, 0), p(s2);
  int64_t int8_forward_tiles = 0;
  const int p_levels = recipe().scheme == Scheme::paper ? 127 : 255;
  const auto step = [](float code, float scale) {
    return 0.501f * scale + 1e-6f * std::fabs(code) * scale;
  };
  const ref::RecipeForward f = ref::recipe_forward(head, [&](const ref::RecipeTile& t) {
    EXPECT_FALSE(t.backward);
    ASSERT_NE(t.p8, nullptr);
    ++int8_forward_tiles;
    for (int64_t r = 0; r < t.rows; ++r)
      for (int64_t c = 0; c < t.cols; ++c) {
        const int64_t at = r * t.cols + c, whole = (t.q0 + r) * 200 + t.k0 + c;
        if (t.k0 + c >= h.visible(t.q0 + r).second) {
          ASSERT_EQ(t.s2[at], -kInf);
          ASSERT_EQ(t.p[at], 0.0f);
          ASSERT_EQ(t.p8[at], 0);
          continue;
        }
        ++seen_forward[whole];
        s2[whole] = t.s2[at], p[whole] = t.p[at];
        const float code = t.p8[at];
        ASSERT_GE(code, 0.0f);
        ASSERT_LE(code, static_cast<float>(p_levels));
        ASSERT_NEAR(code * t.p_scale[r], t.p[at] * t.v_scale[c], step(code, t.p_scale[r]));
      }
  });
  EXPECT_GT(int8_forward_tiles, 0);
  const ref::RecipeBackwardIn in{f.o.data(), f.lse.data(), h.dout.data(), nullptr, false};
  ref::recipe_backward(head, in, [&](const ref::RecipeTile& t) {
    EXPECT_TRUE(t.backward);
    for (int64_t r = 0; r < t.rows; ++r)
      for (int64_t c = 0; c < t.cols; ++c) {
        const int64_t at = r * t.cols + c, whole = (t.q0 + r) * 200 + t.k0 + c;
        if (t.k0 + c >= h.visible(t.q0 + r).second) {
          ASSERT_EQ(t.p[at], 0.0f);
          ASSERT_EQ(t.ds[at], 0.0f);
          ASSERT_EQ(t.p8[at], 0);
          ASSERT_EQ(t.ds8_query[at], 0);
          ASSERT_EQ(t.ds8_key[at], 0);
          continue;
        }
        ++seen_backward[whole];
        ASSERT_EQ(t.s2[at], s2[whole]) << "forward and backward must see the same logits";
        ASSERT_NEAR(t.p[at], p[whole], 2e-6f * p[whole]);
        const auto check = [&](int code, int levels, float scale, float value) {
          ASSERT_LE(std::abs(code), levels);
          ASSERT_NEAR(static_cast<float>(code) * scale, value,
                      step(static_cast<float>(code), scale));
        };
        check(t.p8[at], p_levels, t.p_scale[c], t.p[at] * t.do_scale[r]);
        check(t.ds8_query[at], 127, t.ds_scale_query[r], t.ds[at] * t.k_fold[c]);
        check(t.ds8_key[at], 127, t.ds_scale_key[c], t.ds[at] * t.q_scale[r]);
      }
  });
  for (int64_t i = 0; i < 150; ++i)
    for (int64_t j = 0; j < 200; ++j) {
      ASSERT_EQ(seen_forward[i * 200 + j], j < h.visible(i).second ? 1 : 0);
      ASSERT_EQ(seen_backward[i * 200 + j], j < h.visible(i).second ? 1 : 0);
    }
}

/// In `vectorwise` each line has a scale of its own: two rows and two columns 10^4 apart survive in
/// tiles that are not square, where swapped axes would lose them.
TEST(RecipeOracle, ScalesFollowTheirAxis) {
  RandomHead h(192, 256, 64);
  for (int64_t i = 0; i < 192; i += 2)
    for (int64_t c = 0; c < 64; ++c) h.dout[i * 64 + c] *= 1e-4f;  // every second row of dS
  const ExactAnswer want(h);
  const RecipeAnswer got(h, vectorwise_recipe());
  trace::ErrorStats dq;
  for (int64_t i = 0; i < 192; ++i)
    dq.add_row(&got.backward.dq[i * 64], &want.result.dq[i * 64], 64, i);
  dq.finish();
  EXPECT_LT(dq.worst_row_error, 0.06);

  trace::ErrorStats coarse;
  const RecipeAnswer paper(h, paper_recipe());
  for (int64_t i = 0; i < 192; ++i)
    coarse.add_row(&paper.backward.dq[i * 64], &want.result.dq[i * 64], 64, i);
  coarse.finish();
  EXPECT_EQ(coarse.bad_row_fraction, 0.5) << "one scale per tile loses every small row";
}

TEST(RecipeOracle, LeadingEntriesOfAListStayInFloatingPoint) {
  const RandomHead h(100, 300, 64);
  Recipe r = vectorwise_recipe();
  int lead = 0;
  const auto o = [&] {
    ref::RecipeHead head = h.recipe(r);
    head.visible.restrict_to({128, 128, {{0, 1, 2}}});
    head.lead = lead;
    return ref::recipe_forward(head).o;
  };
  const std::vector<float> none = o();
  EXPECT_EQ(none, ref::recipe_forward(h.recipe(r)).o) << "a list of all keys";
  lead = 1;
  const std::vector<float> one = o();
  lead = -1;
  const std::vector<float> all = o();
  lead = 3;
  EXPECT_EQ(o(), all);
  EXPECT_NE(none, one);
  EXPECT_NE(one, all);
  r.high_precision = kMatmulO;
  EXPECT_NE(o(), all) << "lifted, V has no codes either";
  // Each step takes away some of the error.
  const std::vector<double> want = ExactAnswer(h).result.o;
  r.high_precision |= kMatmulS;
  const double lifted = rel_l2(o(), want);
  r.high_precision = kMatmulS;
  const double values = rel_l2(o(), want);
  lead = 0;
  EXPECT_LT(lifted, 1e-5);
  EXPECT_GT(values, 1e-3);
  EXPECT_LT(values, 0.9 * rel_l2(o(), want));
}

/// Pairs of keys share each query's weight equally, all other keys are 2^-363 away, and every
/// tensor is made of multiples of its scale: nothing is lost but the rounding of FP32.
RandomHead lossless_head() {
  constexpr int64_t kQueries = 32, kKeys = 64, kDim = 32;
  RandomHead h(kQueries, kKeys, kDim);
  testing::Random random(11);
  h.scale = 0x1p-6f;
  std::fill(h.q.begin(), h.q.end(), 0.0f);
  for (int64_t i = 0; i < kQueries; ++i) h.q[i * kDim + i] = 127.0f;
  for (int64_t j = 0; j < kKeys; ++j)
    for (int64_t c = 0; c < kDim; ++c) h.k[j * kDim + c] = c == j / 2 ? 0.0f : -127.0f;
  for (int64_t j = 0; j < kKeys; j += 2) {
    for (int64_t c = 0; c < kDim; ++c)
      h.v[j * kDim + c] = h.v[(j + 1) * kDim + c] = static_cast<float>(random.integer(-126, 126));
    h.v[j * kDim] = 64.0f, h.v[(j + 1) * kDim] = -64.0f;
    h.v[j * kDim + 1] = h.v[(j + 1) * kDim + 1] = 127.0f;
  }
  for (float& x : h.dout) x = static_cast<float>(random.integer(-126, 126));
  for (int64_t i = 0; i < kQueries; ++i) h.dout[i * kDim] = 127.0f;  // so all |dS| are 127·128/4
  return h;
}

TEST_P(RecipeScheme, LosslessInputsStayExact) {
  const RandomHead h = lossless_head();
  Recipe r = recipe();
  r.smooth_k = r.rotate = false;
  const RecipeAnswer got(h, r);
  const ExactAnswer want(h);
  for (size_t n = 0; n < h.q.size(); ++n)
    ASSERT_EQ(static_cast<float>(got.forward.inputs.q8[n]), h.q[n]);
  for (size_t n = 0; n < h.k.size(); ++n) {
    ASSERT_EQ(static_cast<float>(got.forward.inputs.k8[n]), h.k[n]);
    ASSERT_EQ(static_cast<float>(got.forward.inputs.v8[n]), h.v[n]);
  }
  for (size_t n = 0; n < h.dout.size(); ++n)
    ASSERT_EQ(static_cast<float>(got.backward.do8[n]), h.dout[n]);
  for (float s : got.forward.inputs.k_scale) ASSERT_EQ(s, 1.0f);

  const auto check = [](const std::vector<float>& x, const std::vector<double>& y,
                        const char* name) {
    for (size_t n = 0; n < x.size(); ++n) {
      // A few roundings of FP32 on the way: 8 ulp, and where the answer is zero 4 ulp of a summand.
      const double ulp = std::fabs(y[n]) * 0x1p-23;
      ASSERT_NEAR(static_cast<double>(x[n]), y[n], std::max(8 * ulp, 1e-4)) << name << " " << n;
    }
  };
  check(got.forward.o, want.result.o, "O");
  check(got.backward.dv, want.result.dv, "dV");
  check(got.backward.dq, want.result.dq, "dQ");  // entries are ± 8001 or 0
  check(got.backward.dk, want.result.dk, "dK");
}

TEST_P(RecipeScheme, ZerosGiveZeros) {
  for (int tensor = 0; tensor < 4; ++tensor) {
    RandomHead h(100, 100, 32);
    std::vector<float>* x[4] = {&h.q, &h.k, &h.v, &h.dout};
    std::fill(x[tensor]->begin(), x[tensor]->end(), 0.0f);
    const RecipeAnswer a(h, recipe());
    for (const std::vector<float>* out :
         {&a.forward.o, &a.forward.lse, &a.backward.dq, &a.backward.dk, &a.backward.dv})
      for (float y : *out) ASSERT_TRUE(std::isfinite(y)) << tensor;
    const auto zero = [](const std::vector<float>& y) {
      return y == std::vector<float>(y.size(), 0.0f);
    };
    EXPECT_EQ(zero(a.backward.dk), tensor != 1) << "dK is zero without Q, V (dP = D) or dO";
    EXPECT_EQ(zero(a.backward.dq), tensor != 0) << "dQ is zero without K, V or dO";
    EXPECT_EQ(zero(a.forward.o), tensor == 2);
    EXPECT_EQ(zero(a.backward.dv), tensor == 3);
  }
}

TEST_P(RecipeScheme, RowsWithoutKeys) {
  RandomHead h =
      RandomHead(200, 70, 32).causal();  // 130 rows see nothing: a whole tile and part of the next
  h.dlse = testing::normal_values(200, 1.0, 3);
  for (float& x : h.k) x += 10.0f;  // the mean of K may not leak into rows without keys
  const RecipeAnswer a(h, recipe());
  for (int64_t i = 0; i < 130; ++i) {
    ASSERT_EQ(a.forward.lse[i], -kInf);
    for (int64_t c = 0; c < 32; ++c) {
      ASSERT_EQ(a.forward.o[i * 32 + c], 0.0f);
      ASSERT_EQ(a.backward.dq[i * 32 + c], 0.0f);
    }
  }
  EXPECT_LT(rel_l2(a.backward.dv, ExactAnswer(h).result.dv), 0.08);

  const RandomHead none(5, 0, 32);
  const RecipeAnswer b(none, recipe());
  EXPECT_EQ(b.forward.lse, std::vector<float>(5, -kInf));
  EXPECT_EQ(b.forward.max_logit, -kInf);
  EXPECT_EQ(b.backward.dq, std::vector<float>(5 * 32, 0.0f));

  const RecipeAnswer c(RandomHead(0, 5, 32), recipe());
  EXPECT_EQ(c.backward.dk, std::vector<float>(5 * 32, 0.0f));
  EXPECT_EQ(c.backward.dv, std::vector<float>(5 * 32, 0.0f));
}

/// LSE = -inf means that the row saw no key anywhere, whatever the mask of this call is.
TEST_P(RecipeScheme, LseOfMinusInfinitySwitchesARowOff) {
  RandomHead h(70, 90, 32);
  const ref::RecipeHead head = h.recipe(recipe());
  ref::RecipeForward f = ref::recipe_forward(head);
  f.lse[5] = -kInf;
  for (int64_t c = 0; c < 32; ++c) f.o[5 * 32 + c] = 0.0f;
  const ref::RecipeBackward off =
      ref::recipe_backward(head, {f.o.data(), f.lse.data(), h.dout.data(), nullptr, false});
  for (int64_t c = 0; c < 32; ++c) EXPECT_EQ(off.dq[5 * 32 + c], 0.0f);
  for (int64_t c = 0; c < 32; ++c) EXPECT_NE(off.dq[6 * 32 + c], 0.0f);
  for (float x : off.dk) ASSERT_TRUE(std::isfinite(x));
  h.visible = [](int64_t i) { return std::pair<int64_t, int64_t>(0, i == 5 ? 0 : 90); };
  const ref::RecipeBackward masked = ref::recipe_backward(
      h.recipe(recipe()), {f.o.data(), f.lse.data(), h.dout.data(), nullptr, false});
  EXPECT_EQ(off.dk, masked.dk);
  EXPECT_EQ(off.dv, masked.dv);
}

}  // namespace
}  // namespace sagebwd
