// SPDX-License-Identifier: Apache-2.0
// The rotation of Q and K: an orthogonal matrix whatever the head dim, undone by its transpose, and
// good at spreading what stands out.
#include "numerics/rotate.h"

#include <gtest/gtest.h>

#include <cmath>
#include <vector>

#include "support/random.h"

namespace sagebwd::numerics {
namespace {

std::vector<float> random_row(int d, uint64_t seed) {
  testing::Random random(seed);
  std::vector<float> x(static_cast<size_t>(d));
  for (float& v : x) v = random.between(-1.0f, 1.0f);
  return x;
}

double dot(const std::vector<float>& a, const std::vector<float>& b) {
  double sum = 0;
  for (size_t c = 0; c < a.size(); ++c) sum += static_cast<double>(a[c]) * b[c];
  return sum;
}

double largest(const std::vector<float>& x) {
  double top = 0;
  for (float v : x) top = std::max(top, std::fabs(static_cast<double>(v)));
  return top;
}

TEST(Rotate, KeepsEveryDotProduct) {
  for (int d = 8; d <= 256; d += 8) {
    // Rows of R itself: rotated unit vectors.
    std::vector<std::vector<float>> rows;
    for (int c = 0; c < d; ++c) {
      std::vector<float> unit(static_cast<size_t>(d), 0.0f);
      unit[c] = 1.0f;
      rotate(unit.data(), d);
      rows.push_back(unit);
    }
    for (int a = 0; a < d; ++a)
      for (int b = 0; b <= a; ++b) ASSERT_NEAR(dot(rows[a], rows[b]), a == b, 1e-6) << d;
    std::vector<float> x = random_row(d, 1), y = random_row(d, 2);
    const double before = dot(x, y);
    rotate(x.data(), d), rotate(y.data(), d);
    EXPECT_NEAR(dot(x, y), before, 1e-5) << d;
  }
}

TEST(Rotate, BackIsTheInverse) {
  for (int d = 8; d <= 256; d += 8) {
    const std::vector<float> x = random_row(d, 3);
    std::vector<float> y = x;
    rotate(y.data(), d);
    EXPECT_NE(x, y) << d;
    rotate_back(y.data(), d);
    for (int c = 0; c < d; ++c) ASSERT_NEAR(y[c], x[c], 1e-6) << d << ", channel " << c;
    rotate_back(y.data(), d), rotate(y.data(), d);
    for (int c = 0; c < d; ++c) ASSERT_NEAR(y[c], x[c], 2e-6) << d << ", channel " << c;
  }
}

/// A channel that stands alone becomes equal parts of its block.
TEST(Rotate, SpreadsOneChannel) {
  for (int d : {8, 40, 64, 80, 96, 128, 192, 256}) {
    const int block = rotation_block(d);
    EXPECT_EQ(d % block, 0);
    EXPECT_EQ(block & (block - 1), 0);
    for (int channel : {0, d / 2, d - 1}) {
      std::vector<float> x(static_cast<size_t>(d), 0.0f);
      x[channel] = 100.0f;
      rotate(x.data(), d);
      for (int c = 0; c < d; ++c)
        ASSERT_NEAR(std::fabs(x[c]), c / block == channel / block ? 100 / std::sqrt(block) : 0,
                    1e-5)
            << d << ", channel " << channel << " in " << c;
    }
  }
}

/// Without the signs a constant row would turn into one channel, and so would any row of H.
TEST(Rotate, MakesNoOutlierOfARegularRow) {
  for (int d : {64, 128, 256})
    for (int period : {1, 2, 4, 16, 32}) {
      std::vector<float> x(static_cast<size_t>(d));
      for (int c = 0; c < d; ++c) x[c] = c / period % 2 == 0 ? 1.0f : -1.0f;
      rotate(x.data(), d);
      EXPECT_LT(largest(x), 4.5) << d << ", period " << period;  // its deviation is 1
    }
}

/// Codes are saved, so the rotation may never change.
TEST(Rotate, SignsAreFixed) {
  std::vector<float> x(8, 0.0f);
  x[0] = 1.0f, x[1] = 2.0f;
  rotate(x.data(), 8);  // the first word ends in 0x67: channels 0, 1 and 2 are flipped
  const float unit = 1.0f / std::sqrt(8.0f);
  for (int c = 0; c < 8; ++c) EXPECT_NEAR(x[c], (c % 2 == 0 ? -3.0f : 1.0f) * unit, 1e-6) << c;
  int minus = 0;
  for (int c = 0; c < 256; ++c) minus += rotation_flips(c);
  EXPECT_EQ(minus, 136);
}

}  // namespace
}  // namespace sagebwd::numerics
