// SPDX-License-Identifier: Apache-2.0
// The quantiser against its formulas, written out by hand.
#include "numerics/quantize.h"

#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <set>

#include "support/random.h"

namespace sagebwd::numerics {
namespace {

constexpr float kInf = std::numeric_limits<float>::infinity();
constexpr float kNan = std::numeric_limits<float>::quiet_NaN();

TEST(Quantize, ScaleIsTheLargestMagnitudeOver127) {
  EXPECT_EQ(scale_of(127.0f), 1.0f);
  EXPECT_EQ(scale_of(63.5f), 0.5f);
  EXPECT_EQ(scale_of(1.0f), 1.0f / 127.0f);
  EXPECT_EQ(scale_of(1e-7f), 1e-7f / 127.0f);
  EXPECT_GT(scale_of(std::numeric_limits<float>::max()), 1e36f);
}

TEST(Quantize, GroupsBelowTheThresholdAreZero) {
  EXPECT_EQ(scale_of(0.0f), 0.0f);
  EXPECT_EQ(scale_of(std::nextafter(0x1p-100f, 0.0f)), 0.0f);
  EXPECT_EQ(scale_of(std::numeric_limits<float>::denorm_min()), 0.0f);
  EXPECT_EQ(scale_of(0x1p-100f), 0x1p-100f / 127.0f);
  // The inverse of the smallest scale is finite, and its largest value still reaches code 127.
  const float inverse = inverse_of(scale_of(0x1p-100f));
  EXPECT_LT(inverse, kInf);
  EXPECT_EQ(code_nearest(0x1p-100f, inverse), 127);
}

TEST(Quantize, PoisonedGroupsHaveScaleNanAndCodesZero) {
  for (float amax : {kNan, kInf}) {
    EXPECT_TRUE(std::isnan(scale_of(amax)));
    EXPECT_EQ(inverse_of(scale_of(amax)), 0.0f);
  }
  for (float x : {1.0f, -3.0f, kNan, kInf, -kInf}) {
    EXPECT_EQ(code_nearest(x, 0.0f), 0) << x;
    EXPECT_EQ(code_dither(x, 0.0f, 0.99f), 0) << x;
  }
}

TEST(Quantize, ZeroScaleHasInverseZero) { EXPECT_EQ(inverse_of(0.0f), 0.0f); }

TEST(Quantize, NearestRoundsTiesToEven) {
  const struct {
    float x;
    int code;
  } cases[] = {{0.0f, 0},     {0.49f, 0},    {0.5f, 0},      {0.51f, 1},  {1.5f, 2},
               {2.5f, 2},     {3.5f, 4},     {-0.5f, 0},     {-1.5f, -2}, {-2.5f, -2},
               {126.5f, 126}, {127.0f, 127}, {-127.0f, -127}};
  for (const auto& c : cases) EXPECT_EQ(code_nearest(c.x, 1.0f), c.code) << c.x;
}

/// For any values that share a scale: no code leaves [-127, 127], the largest value reaches ±127,
/// and no error exceeds half a step.
TEST(Quantize, NearestIsWithinHalfAStep) {
  testing::Random random(3);
  for (int round = 0; round < 2000; ++round) {
    const float size =
        std::ldexp(random.between(1.0f, 2.0f), static_cast<int>(random.integer(-99, 120)));
    float values[16], amax = 0;
    for (float& x : values)
      x = size * random.between(-1.0f, 1.0f), amax = std::max(amax, std::fabs(x));
    const float scale = scale_of(amax), inverse = inverse_of(scale);
    for (float x : values) {
      const int code = code_nearest(x, inverse);
      ASSERT_LE(std::abs(code), 127);
      ASSERT_TRUE(std::fabs(x) < amax || std::abs(code) == 127) << x;
      // x·(1/s) differs from x/s by rounding, a few parts in 2^24 of 127.
      ASSERT_LE(std::fabs(static_cast<double>(x) / static_cast<double>(scale) - code), 0.5 + 3e-5);
    }
  }
}

TEST(Dither, OffsetIsTheFractionOfTheSum) {
  for (int i : {0, 1, 2, 63, 127, 255})
    for (int j : {0, 1, 5, 64, 255})
      for (float u : {0.0f, 0.25f, 0.999999f}) {
        const double sum = 0.7548776662 * i + 0.5698402910 * j + static_cast<double>(u);
        const float t = dither_offset(dither_query_term(i), dither_key_term(j, u));
        ASSERT_GE(t, 0.0f);
        ASSERT_LT(t, 1.0f);
        const double difference = std::fabs(static_cast<double>(t) - (sum - std::floor(sum)));
        // Near 0 and 1 the FP32 sum may wrap the other way.
        EXPECT_LT(std::min(difference, 1.0 - difference), 5e-5) << i << " " << j << " " << u;
      }
}

/// floor(y + t) averaged over the tile's uniform is y, for either sign and at any place of the
/// tile.
TEST(Dither, IsUnbiasedOverItsUniform) {
  constexpr int kDraws = 4096;
  for (float y : {0.1f, 0.5f, 0.73f, 3.25f, 126.9f, -0.1f, -0.5f, -7.77f, -126.4f})
    for (int i : {0, 3, 100})
      for (int j : {0, 17}) {
        double sum = 0;
        for (int n = 0; n < kDraws; ++n) {
          const float u = (static_cast<float>(n) + 0.5f) / kDraws;
          sum += code_dither(y, 1.0f, dither_offset(dither_query_term(i), dither_key_term(j, u)));
        }
        EXPECT_NEAR(sum / kDraws, static_cast<double>(y), 1.5 / kDraws)
            << y << " " << i << " " << j;
      }
}

/// Inside one tile, too, the mean is close to the value: the offsets are spread evenly.
TEST(Dither, IsEvenInsideATile) {
  const float u = 0.37f;
  for (float y : {0.02f, 0.3f, 0.5f, 0.9f}) {
    double sum = 0;
    for (int i = 0; i < 64; ++i)
      for (int j = 0; j < 64; ++j)
        sum += code_dither(y, 1.0f, dither_offset(dither_query_term(i), dither_key_term(j, u)));
    EXPECT_NEAR(sum / 4096, static_cast<double>(y), 0.004)
        << y;  // random offsets would give ± 0.008
  }
}

TEST(Dither, NeverLeavesTheCodesAndKeepsZeros) {
  EXPECT_EQ(code_dither(127.0f, 1.0f, 0.999f), 127);
  EXPECT_EQ(code_dither(127.00001f, 1.0f, 0.9999999f), 127);
  EXPECT_EQ(code_dither(-127.0f, 1.0f, 0.0f), -127);
  EXPECT_EQ(code_dither(-127.00001f, 1.0f, 0.0f), -127);
  EXPECT_EQ(code_dither(0.0f, 1.0f, 0.9999999f), 0);
  EXPECT_EQ(code_dither(kNan, 1.0f, 0.5f), 0);
}

TEST(Dither, EveryKeyOfTheUniformMatters) {
  const auto p = DitherOperand::p_backward;
  const std::set<float> all = {dither_uniform(1, 2, 3, 4, 5, p),
                               dither_uniform(9, 2, 3, 4, 5, p),
                               dither_uniform(1, 9, 3, 4, 5, p),
                               dither_uniform(1, 2, 9, 4, 5, p),
                               dither_uniform(1, 2, 3, 9, 5, p),
                               dither_uniform(1, 2, 3, 4, 9, p),
                               dither_uniform(1, 2, 3, 4, 5, DitherOperand::ds_key)};
  EXPECT_EQ(all.size(), 7u);
}

TEST(Quantize, FiniteMeansNeitherNanNorInfinite) {
  for (float x : {0.0f, -1.0f, 3e38f, std::numeric_limits<float>::denorm_min()})
    EXPECT_TRUE(is_finite(x)) << x;
  for (float x : {kInf, -kInf, kNan, -kNan}) EXPECT_FALSE(is_finite(x)) << x;
}

}  // namespace
}  // namespace sagebwd::numerics
