// SPDX-License-Identifier: Apache-2.0
// The feature map of the linear branch and the way back, against FP64.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <vector>

#include "support/implementations.h"
#include "support/random.h"

namespace sagebwd::testing {
namespace {

constexpr int kRows = 5;

class Features : public PerKernelTable {};

TEST_P(Features, SoftmaxAndItsGradient) {
  Random random(1);
  for (int d : {8, 16, 24, 128, 256})
    for (float spread : {0.1f, 3.0f, 50.0f}) {
      const int ld = (d + 15) / 16 * 16;
      std::vector<float> x(static_cast<size_t>(kRows * ld), std::nanf("")), g(x.size(), 0.0f);
      for (int r = 0; r < kRows; ++r)
        for (int c = 0; c < d; ++c) {
          x[r * ld + c] = random.between(-spread, spread);
          g[r * ld + c] = random.between(-1.0f, 1.0f);
        }
      std::vector<float> phi = x, back = g;
      kernels().softmax_rows(phi.data(), ld, kRows, d);
      kernels().softmax_rows_back(phi.data(), back.data(), ld, kRows);
      for (int r = 0; r < kRows; ++r) {
        const float* row = &x[r * ld];
        const auto top = static_cast<double>(*std::max_element(row, row + d));
        double sum = 0, dot = 0;
        for (int c = 0; c < d; ++c) sum += std::exp(static_cast<double>(row[c]) - top);
        for (int c = 0; c < d; ++c)
          dot += std::exp(static_cast<double>(row[c]) - top) / sum *
                 static_cast<double>(g[r * ld + c]);
        for (int c = 0; c < d; ++c) {
          const double want = std::exp(static_cast<double>(row[c]) - top) / sum;
          // The exponent is rounded before it is raised, so tiny features lose a little more. What
          // FP32 cannot hold as a normal number is 0.
          const double depth = 1 + top - static_cast<double>(row[c]);
          ASSERT_NEAR(static_cast<double>(phi[r * ld + c]), want, 5e-7 * depth * want + 1e-37)
              << "d " << d << " spread " << spread;
          ASSERT_NEAR(static_cast<double>(back[r * ld + c]),
                      want * (static_cast<double>(g[r * ld + c]) - dot), 2e-6);
        }
        for (int c = d; c < ld; ++c) ASSERT_EQ(phi[r * ld + c], 0.0f);
      }
    }
}

TEST_P(Features, ARowWithNanIsNan) {
  std::vector<float> x(16, 1.0f);
  x[3] = std::nanf("");
  kernels().softmax_rows(x.data(), 16, 1, 16);
  for (float value : x) EXPECT_TRUE(std::isnan(value));
}

TEST_P(Features, SumsInFp64) {
  std::vector<float> x(37, 1e-9f);
  std::vector<double> sum(37, 1.0);
  kernels().add_in_f64(x.data(), 37, sum.data());
  for (double value : sum) EXPECT_EQ(value, 1.0 + static_cast<double>(1e-9f));
  kernels().subtract_in_f64(x.data(), 36, sum.data());
  for (int i = 0; i < 37; ++i) EXPECT_EQ(sum[i] == 1.0, i < 36);
  x.assign(37, -2.0f);
  kernels().add_magnitudes_in_f64(x.data(), 36, sum.data());
  for (int i = 0; i < 37; ++i) EXPECT_EQ(sum[i] == 3.0, i < 36);
}

SAGE_FOR_KERNEL_TABLES(Features);

}  // namespace
}  // namespace sagebwd::testing
