// SPDX-License-Identifier: Apache-2.0
// One score tile of the forward: exp2, the online softmax, masking, and codes of P.
#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <vector>

#include "numerics/quantize.h"
#include "support/implementations.h"
#include "support/random.h"

namespace sagebwd::testing {
namespace {

using cpu::isa::ForwardTile;
using cpu::isa::Kernels;

constexpr float kInf = std::numeric_limits<float>::infinity();

/// A tile with all its memory. s is [tile_k][tile_q].
struct Tile {
  Tile(int q, int k)
      : tile_q(q),
        tile_k(k),
        scores(static_cast<size_t>(q * k), 0.0f),
        sums(static_cast<size_t>(q * k), 0),
        k_scale(k, 1.0f),
        logit_factor(q, 1.0f),
        v_log2(k, 0.0f),
        v_inverse(k, 1.0f),
        m(q, -kInf),
        l(q, 0.0f),
        logit_max(q, -kInf),
        alpha(q, -7.0f),
        beta(q, -7.0f),
        p8(static_cast<size_t>(q * k), 77) {
    for (int i = 0; i < q; ++i) dither.push_back(numerics::dither_query_term(i));
  }

  void run(const Kernels& kernels, bool s_is_float, bool p_float, bool use_dither = false,
           float u = 0.0f) {
    kernels.forward_tile({.tile_q = tile_q,
                          .tile_k = tile_k,
                          .s = s_is_float ? static_cast<void*>(scores.data()) : sums.data(),
                          .s_is_float = s_is_float,
                          .k_scale = k_scale.data(),
                          .logit_factor = logit_factor.data(),
                          .bias = bias.empty() ? nullptr : bias.data(),
                          .begin = begin.empty() ? nullptr : begin.data(),
                          .end = end.empty() ? nullptr : end.data(),
                          .v_log2 = v_log2.data(),
                          .v_inverse = v_inverse.data(),
                          .m = m.data(),
                          .l = l.data(),
                          .logit_max = logit_max.data(),
                          .alpha = alpha.data(),
                          .beta = beta.data(),
                          .p_float = p_float,
                          .p8 = p8.data(),
                          .p_levels = static_cast<float>(kernels.p_levels),
                          .dither_query = use_dither ? dither.data() : nullptr,
                          .dither_u = u});
  }
  float& score(int query, int key) { return scores[key * tile_q + query]; }
  int code(int query, int key) const {
    return p8[((query / 16 * (tile_k / 4) + key / 4) * 16 + query % 16) * 4 + key % 4];
  }
  bool visible(int query, int key) const {
    return begin.empty() || (begin[query] <= key && key < end[query]);
  }

  int tile_q, tile_k;
  std::vector<float> scores;
  std::vector<int32_t> sums;
  std::vector<float> k_scale, logit_factor, bias, v_log2, v_inverse, m, l, logit_max, alpha, beta,
      dither;
  std::vector<int32_t> begin, end;
  std::vector<uint8_t> p8;
};

void fill_random(Tile& t, Random& random, float spread) {
  for (float& s : t.scores) s = random.between(-spread, spread);
}

/// Causal-looking ranges, with one query that sees nothing and one that sees everything.
void mask(Tile& t) {
  for (int i = 0; i < t.tile_q; ++i) {
    t.begin.push_back(i % 7 == 3 ? i % t.tile_k / 2 : 0);
    t.end.push_back(std::min(t.tile_k, i + 1));
  }
  t.begin[5] = t.end[5] = 0;
  t.begin[6] = 0, t.end[6] = t.tile_k;
}

class ForwardTiles : public PerKernelTable {
 protected:
  float levels() const { return static_cast<float>(kernels().p_levels); }
};

TEST_P(ForwardTiles, Exp2IsAccurateEverywhere) {
  // Key 0 has the logit 0, so p of the others is exp2 of their own logit. Covers [-130, 0] densely.
  double worst = 0;
  for (int sweep = 0; sweep < 32; ++sweep) {
    Tile t(64, 256);
    std::vector<float> x(t.scores.size(), 0.0f);
    for (int key = 1; key < 256; ++key)
      for (int query = 0; query < 64; ++query)
        t.score(query, key) =
            -130.0f * (static_cast<float>(key * 64 + query) + static_cast<float>(sweep) / 32) /
            (256.0f * 64.0f);
    x = t.scores;
    t.run(kernels(), true, true);
    for (size_t i = 0; i < x.size(); ++i) {
      const double want = std::exp2(static_cast<double>(x[i]));
      if (x[i] <= -126.5f) {
        ASSERT_EQ(t.scores[i], 0.0f) << x[i];
      } else {
        worst = std::max(worst, std::fabs(t.scores[i] - want) / want);
      }
    }
  }
  EXPECT_LT(worst, 2.5e-7);
}

TEST_P(ForwardTiles, LogitsCombineScalesAndBias) {
  Random random(21);
  Tile t(128, 64);
  for (int32_t& s : t.sums) s = static_cast<int32_t>(random.integer(-20000, 20000));
  for (float& s : t.k_scale) s = std::exp2(random.between(-9.0f, -5.0f));
  for (float& s : t.logit_factor) s = std::exp2(random.between(-9.0f, -5.0f));
  for (int j = 0; j < t.tile_k; ++j) t.bias.push_back(random.between(-3.0f, 3.0f));
  const std::vector<int32_t> sums = t.sums;
  t.run(kernels(), false, true);
  const float* p = reinterpret_cast<const float*>(t.sums.data());
  for (int i = 0; i < t.tile_q; ++i) {
    std::vector<double> s2;
    double top = -1e30, sum = 0;
    for (int j = 0; j < t.tile_k; ++j) {
      s2.push_back(static_cast<double>(sums[j * t.tile_q + i]) * t.k_scale[j] * t.logit_factor[i] +
                   t.bias[j]);
      top = std::max(top, s2.back());
    }
    for (int j = 0; j < t.tile_k; ++j) {
      sum += std::exp2(s2[j] - top);
      ASSERT_NEAR(p[j * t.tile_q + i], std::exp2(s2[j] - top), 2e-5) << i << ", " << j;
    }
    EXPECT_NEAR(t.m[i], top, 1e-5 * std::fabs(top) + 1e-6);
    EXPECT_NEAR(t.l[i], sum, 1e-4 * sum);
  }
}

/// V's scale multiplies P: the maximum is that of the products, the sum is that of P alone, and the
/// largest logit is what it was.
TEST_P(ForwardTiles, ScalesOfValuesAreFoldedIntoP) {
  Random random(28);
  Tile t(64, 128);
  fill_random(t, random, 5.0f);
  for (int j = 0; j < t.tile_k; ++j) {
    t.v_log2[j] = static_cast<float>(random.integer(-20, 3));
    t.v_inverse[j] = std::exp2(-t.v_log2[j]);
  }
  const Tile given = t;
  t.run(kernels(), true, true);
  for (int i = 0; i < t.tile_q; ++i) {
    double top = -1e30, logit_max = -1e30, sum = 0;
    const auto logit = [&](int j) { return static_cast<double>(given.scores[j * t.tile_q + i]); };
    for (int j = 0; j < t.tile_k; ++j) {
      top = std::max(top, logit(j) + given.v_log2[j]);
      logit_max = std::max(logit_max, logit(j));
    }
    for (int j = 0; j < t.tile_k; ++j) {
      const double p = std::exp2(logit(j) + given.v_log2[j] - top);
      ASSERT_NEAR(t.score(i, j), p, 3e-6) << i << ", " << j;
      sum += std::exp2(logit(j) - top);
    }
    EXPECT_NEAR(t.m[i], top, 1e-5);
    EXPECT_NEAR(t.l[i], sum, 1e-5 * sum);
    EXPECT_NEAR(t.logit_max[i], logit_max, 2e-6 * 20);
  }
}

TEST_P(ForwardTiles, RunningMaximumAndSumFollowTheOnlineSoftmax) {
  Random random(22);
  Tile t(64, 128);
  std::vector<double> top(64, -1e300), sum(64, 0.0);
  for (int step = 0; step < 4; ++step) {
    fill_random(t, random, 4.0f * static_cast<float>(step + 1));
    const std::vector<double> old_top = top;
    for (int i = 0; i < 64; ++i) {
      double tile_top = -1e300, tile_sum = 0;
      for (int j = 0; j < 128; ++j) tile_top = std::max<double>(tile_top, t.score(i, j));
      for (int j = 0; j < 128; ++j) tile_sum += std::exp2(t.score(i, j) - tile_top);
      top[i] = std::max(top[i], tile_top);
      sum[i] = sum[i] * std::exp2(old_top[i] - top[i]) + tile_sum * std::exp2(tile_top - top[i]);
    }
    const std::vector<float> scores = t.scores;
    t.run(kernels(), true, true);
    for (int i = 0; i < 64; ++i) {
      double tile_top = -1e300;
      for (int j = 0; j < 128; ++j) tile_top = std::max<double>(tile_top, scores[j * 64 + i]);
      EXPECT_EQ(t.m[i], static_cast<float>(top[i]));
      EXPECT_EQ(t.logit_max[i], static_cast<float>(top[i]));
      EXPECT_NEAR(t.l[i], sum[i], 1e-5 * sum[i]);
      EXPECT_NEAR(t.alpha[i], std::exp2(old_top[i] - top[i]), 1e-6);
      EXPECT_NEAR(t.beta[i], std::exp2(tile_top - top[i]), 1e-6);
    }
  }
}

TEST_P(ForwardTiles, MaskedPairsDoNotExist) {
  Random random(23);
  Tile t(64, 64), codes(64, 64);
  mask(t);
  fill_random(t, random, 3.0f);
  for (int i = 0; i < 64; ++i)
    for (int j = 0; j < 64; ++j)  // junk outside the mask must not matter
      if (!t.visible(i, j)) t.score(i, j) = j % 3 == 0 ? std::nanf("") : 1e30f;
  codes.begin = t.begin, codes.end = t.end, codes.scores = t.scores;
  const std::vector<float> scores = t.scores;
  t.run(kernels(), true, true);
  codes.run(kernels(), true, false);
  for (int i = 0; i < 64; ++i) {
    float top = -kInf;
    for (int j = t.begin[i]; j < t.end[i]; ++j) top = std::max(top, scores[j * 64 + i]);
    EXPECT_EQ(t.m[i], top);
    EXPECT_EQ(t.logit_max[i], top);
    for (int j = 0; j < 64; ++j) {
      if (!t.visible(i, j)) {
        EXPECT_EQ(t.score(i, j), 0.0f);
        EXPECT_EQ(codes.code(i, j), 0);
      } else {
        EXPECT_NEAR(t.score(i, j), std::exp2(scores[j * 64 + i] - top), 1e-6);
      }
    }
  }
  EXPECT_EQ(t.l[5], 0.0f);  // sees nothing
  EXPECT_EQ(t.m[5], -kInf);
  EXPECT_EQ(t.beta[5], 0.0f);
}

TEST_P(ForwardTiles, NanLogitReachesItsOwnQueryOnly) {
  Random random(24);
  Tile t(64, 64);
  fill_random(t, random, 3.0f);
  t.score(17, 40) = std::nanf("");
  for (int j = 0; j < 64; ++j) t.score(18, j) = std::nanf("");  // nothing but NaN
  t.run(kernels(), true, true);
  for (int i = 0; i < 64; ++i) EXPECT_EQ(std::isnan(t.l[i]), i == 17 || i == 18) << i;
  EXPECT_TRUE(std::isnan(t.score(17, 40)));
}

TEST_P(ForwardTiles, CodesAreTheRoundedProbabilities) {
  Random random(25);
  for (int tile_q : {64, 128, 256})
    for (bool masked : {false, true}) {
      Tile t(tile_q, 128), codes(tile_q, 128);
      fill_random(t, random, 8.0f);
      if (masked) mask(t);
      codes.scores = t.scores, codes.begin = t.begin, codes.end = t.end;
      t.run(kernels(), true, true);
      codes.run(kernels(), true, false);
      EXPECT_EQ(t.l, codes.l);
      for (int i = 0; i < tile_q; ++i)
        for (int j = 0; j < 128; ++j)
          ASSERT_EQ(codes.code(i, j), numerics::code_nearest(t.score(i, j), levels()));
    }
}

TEST_P(ForwardTiles, DitheredCodesFollowTheFormula) {
  Random random(26);
  Tile t(128, 64), scores(128, 64);
  fill_random(t, random, 8.0f);
  mask(t);
  scores = t;
  t.run(kernels(), true, true);
  for (int draw = 0; draw < 16; ++draw) {
    Tile codes = scores;
    const float u = random.unit();
    codes.run(kernels(), true, false, true, u);
    for (int i = 0; i < 128; ++i)
      for (int j = 0; j < 64; ++j) {
        const float offset = numerics::dither_offset(numerics::dither_query_term(i),
                                                     numerics::dither_key_term(j, u));
        ASSERT_EQ(codes.code(i, j),
                  numerics::code_dither(t.score(i, j), levels(), offset, levels()));
      }
  }
}

/// Over the uniform u the code is right on average and has the variance f·(1 - f) of its fraction
/// f.
TEST_P(ForwardTiles, DitherIsUnbiasedWithTheVarianceOfItsFraction) {
  Random random(27);
  Tile scores(64, 64);
  fill_random(scores, random, 5.0f);
  Tile p = scores;
  p.run(kernels(), true, true);
  constexpr int kDraws = 2048;
  std::vector<double> sum(64 * 64, 0.0), square(64 * 64, 0.0);
  for (int draw = 0; draw < kDraws; ++draw) {
    Tile codes = scores;
    codes.run(kernels(), true, false, true, (static_cast<float>(draw) + random.unit()) / kDraws);
    for (int i = 0; i < 64; ++i)
      for (int j = 0; j < 64; ++j) {
        sum[j * 64 + i] += codes.code(i, j);
        square[j * 64 + i] += codes.code(i, j) * codes.code(i, j);
      }
  }
  double variance = 0, expected = 0;
  for (size_t i = 0; i < sum.size(); ++i) {
    const double y = static_cast<double>(p.scores[i] * levels()), mean = sum[i] / kDraws;
    ASSERT_NEAR(mean, y, 2e-3) << i;  // u is stratified: the error is of order 1 / draws
    const double f = y - std::floor(y);
    variance += square[i] / kDraws - mean * mean;
    expected += f * (1 - f);
  }
  EXPECT_NEAR(variance / expected, 1.0, 0.02);
}

SAGE_FOR_KERNEL_TABLES(ForwardTiles);

}  // namespace
}  // namespace sagebwd::testing
