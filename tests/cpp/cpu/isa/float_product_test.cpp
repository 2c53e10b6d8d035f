// SPDX-License-Identifier: Apache-2.0
// The FP32 products: exact on small integers, and within the bound of FP32 summation on random
// values.
#include <gtest/gtest.h>

#include <cmath>
#include <functional>
#include <vector>

#include "base/half.h"
#include "support/implementations.h"
#include "support/random.h"

namespace sagebwd::testing {
namespace {

using cpu::isa::FloatProduct;

constexpr int kGap = 16;

struct Size {
  int m, n, k;
};
const std::vector<Size> kSizes = {{4, 16, 1},    {8, 32, 7},     {16, 48, 16},  {64, 64, 64},
                                  {20, 80, 100}, {128, 112, 64}, {256, 256, 96}};

struct Operands {
  int m, n, k;
  std::vector<float> left, right;  // with gaps of NaN behind each row

  Operands(const Size& s, bool integers, Random& random) : m(s.m), n(s.n), k(s.k) {
    const auto fill = [&](std::vector<float>& x, int rows, int cols) {
      x.assign(static_cast<size_t>(rows * (cols + kGap)), std::nanf(""));
      for (int i = 0; i < rows; ++i)
        for (int j = 0; j < cols; ++j)
          x[i * (cols + kGap) + j] = integers ? static_cast<float>(random.integer(-100, 100))
                                              : random.between(-2.0f, 2.0f);
    };
    fill(left, m, k);
    fill(right, k, n);
  }
  FloatProduct product() const { return {m, n, k, left.data(), k + kGap, right.data(), n + kGap}; }
  double sum(int i, int j, bool magnitudes = false) const {
    double s = 0;
    for (int t = 0; t < k; ++t) {
      const double x = static_cast<double>(left[i * (k + kGap) + t]) * right[t * (n + kGap) + j];
      s += magnitudes ? std::fabs(x) : x;
    }
    return s;
  }
};

class FloatProducts : public PerKernelTable {
 protected:
  /// `want(sum, before, j)` is the result; `weight(j)` what the sum is multiplied with.
  void check(const std::function<void(const FloatProduct&, float* c, int64_t ldc)>& product,
             const std::function<double(double sum, double before, int j)>& want,
             const std::function<double(int j)>& weight) {
    Random random(11);
    for (const Size& s : kSizes)
      for (bool integers : {true, false}) {
        const Operands x(s, integers, random);
        const int ldc = s.n + kGap;
        std::vector<float> c(static_cast<size_t>(s.m * ldc));
        for (float& v : c) v = static_cast<float>(random.integer(-16, 16));
        const std::vector<float> before = c;
        product(x.product(), c.data(), ldc);
        for (int i = 0; i < s.m; ++i) {
          for (int j = 0; j < s.n; ++j) {
            const double old = before[i * ldc + j], expected = want(x.sum(i, j), old, j);
            const double bound =
                integers ? 0
                         : 0x1p-24 * (s.k + 2) * (x.sum(i, j, true) * weight(j) + std::fabs(old));
            ASSERT_NEAR(c[i * ldc + j], expected, bound)
                << "m " << s.m << " n " << s.n << " k " << s.k << " at " << i << ", " << j;
          }
          for (int j = s.n; j < ldc; ++j) ASSERT_EQ(c[i * ldc + j], before[i * ldc + j]) << "gap";
        }
      }
  }
};

double one(int) { return 1.0; }

TEST_P(FloatProducts, Store) {
  check([&](const FloatProduct& p, float* c, int64_t ldc) { kernels().store_f32(p, c, ldc); },
        [](double sum, double, int) { return sum; }, one);
}

TEST_P(FloatProducts, Add) {
  check([&](const FloatProduct& p, float* c, int64_t ldc) { kernels().add_f32(p, c, ldc); },
        [](double sum, double before, int) { return before + sum; }, one);
}

TEST_P(FloatProducts, Blend) {
  std::vector<float> alpha, beta;
  for (int j = 0; j < 256; ++j) {
    alpha.push_back(std::ldexp(1.0f, -(j % 4)));
    beta.push_back(std::ldexp(1.0f, -(j % 3)));
  }
  check([&](const FloatProduct& p, float* c,
            int64_t ldc) { kernels().blend_f32(p, alpha.data(), beta.data(), c, ldc); },
        [&](double sum, double before, int j) { return before * alpha[j] + sum * beta[j]; },
        [&](int j) { return static_cast<double>(beta[j]); });
}

/// A NaN spoils its own row or column of the product and nothing else.
TEST_P(FloatProducts, NanStaysInItsRowAndColumn) {
  Random random(12);
  Operands x({8, 32, 16}, false, random);
  x.left[3 * (x.k + kGap) + 5] = std::nanf("");
  x.right[7 * (x.n + kGap) + 20] = std::nanf("");
  std::vector<float> c(8 * 32);
  kernels().store_f32(x.product(), c.data(), 32);
  for (int i = 0; i < 8; ++i)
    for (int j = 0; j < 32; ++j)
      EXPECT_EQ(std::isnan(c[i * 32 + j]), i == 3 || j == 20) << i << ", " << j;
}

/// A product of BF16 values, where the instruction set has one: exact on small integers, such as
/// codes, and within the bound of FP32 summation on random values.
TEST_P(FloatProducts, StoreBf16) {
  if (kernels().store_bf16 == nullptr) GTEST_SKIP() << "has no product of BF16 values";
  Random random(13);
  for (const Size& s : {Size{4, 64, 16}, Size{128, 64, 64}, Size{60, 128, 80}, Size{128, 256, 256}})
    for (bool integers : {true, false}) {
      const auto draw = [&] {
        return from_float<bf16>(integers ? static_cast<float>(random.integer(-127, 127))
                                         : random.between(-2.0f, 2.0f));
      };
      const int ldl = s.k + kGap, ldc = s.n + kGap;
      std::vector<bf16> left(static_cast<size_t>(s.m * ldl)), right(static_cast<size_t>(s.n * s.k));
      for (bf16& x : left) x = draw();
      for (bf16& x : right) x = draw();
      const auto right_at = [&](int t, int j) {
        return to_float(right[((j / 16 * (s.k / 2) + t / 2) * 16 + j % 16) * 2 + t % 2]);
      };
      std::vector<float> c(static_cast<size_t>(s.m * ldc), 5.5f);
      kernels().store_bf16({s.m, s.n, s.k, left.data(), ldl, right.data()}, c.data(), ldc);
      for (int i = 0; i < s.m; ++i) {
        for (int j = 0; j < s.n; ++j) {
          double sum = 0, magnitudes = 0;
          for (int t = 0; t < s.k; ++t) {
            const double x = static_cast<double>(to_float(left[i * ldl + t])) * right_at(t, j);
            sum += x, magnitudes += std::fabs(x);
          }
          ASSERT_NEAR(c[i * ldc + j], sum, integers ? 0 : 0x1p-24 * (s.k + 2) * magnitudes)
              << "m " << s.m << " n " << s.n << " k " << s.k << " at " << i << ", " << j;
        }
        for (int j = s.n; j < ldc; ++j) ASSERT_EQ(c[i * ldc + j], 5.5f) << "gap";
      }
    }
}

SAGE_FOR_KERNEL_TABLES(FloatProducts);

}  // namespace
}  // namespace sagebwd::testing
