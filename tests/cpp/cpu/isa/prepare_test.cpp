// SPDX-License-Identifier: Apache-2.0
// Preparation of inputs: conversions against the definition of each format, codes bit-equal to the
// scalar quantiser, layouts against their index formulas.
#include <gtest/gtest.h>

#include <bit>
#include <cmath>
#include <cstring>
#include <limits>
#include <vector>

#include "base/half.h"
#include "numerics/quantize.h"
#include "numerics/rotate.h"
#include "support/implementations.h"
#include "support/random.h"

namespace sagebwd::testing {
namespace {

constexpr float kInf = std::numeric_limits<float>::infinity();

/// Value of a 16-bit pattern, straight from the definition of the format.
double value_of(Dtype dtype, uint16_t bits) {
  const int exponent_bits = dtype == Dtype::bf16 ? 8 : 5;
  const int mantissa_bits = 15 - exponent_bits;
  const int bias = (1 << (exponent_bits - 1)) - 1;
  const int exponent = bits >> mantissa_bits & ((1 << exponent_bits) - 1);
  const int mantissa = bits & ((1 << mantissa_bits) - 1);
  const double sign = bits & 0x8000 ? -1.0 : 1.0;
  if (exponent == (1 << exponent_bits) - 1)
    return mantissa != 0 ? std::nan("") : sign * static_cast<double>(kInf);
  const double fraction = exponent == 0 ? mantissa : mantissa + (1 << mantissa_bits);
  return sign * std::ldexp(fraction, (exponent == 0 ? 1 : exponent) - bias - mantissa_bits);
}

class Prepare : public PerKernelTable {};

TEST_P(Prepare, LoadsEvery16BitPattern) {
  std::vector<uint16_t> bits(65536);
  for (int i = 0; i < 65536; ++i) bits[i] = static_cast<uint16_t>(i);
  for (Dtype dtype : {Dtype::bf16, Dtype::f16}) {
    std::vector<float> out(65536);
    kernels().load_rows(dtype, bits.data(), 256, 256, 256, out.data(), 256);
    for (int i = 0; i < 65536; ++i) {
      const double want = value_of(dtype, bits[i]);
      if (std::isnan(want)) {
        ASSERT_TRUE(std::isnan(out[i])) << dtype_name(dtype) << " " << i;
      } else {
        ASSERT_EQ(static_cast<double>(out[i]), want) << dtype_name(dtype) << " " << i;
      }
    }
  }
}

TEST_P(Prepare, LoadPadsWithZerosAndHonoursStrides) {
  for (int d : {8, 24, 40}) {
    const int ld = 48, stride = 61, rows = 5;
    std::vector<float> x(static_cast<size_t>(rows * stride), std::nanf("")), out(5 * 48, -1.0f);
    for (int r = 0; r < rows; ++r)
      for (int c = 0; c < d; ++c) x[r * stride + c] = static_cast<float>(100 * r + c);
    kernels().load_rows(Dtype::f32, x.data(), stride, rows, d, out.data(), ld);
    for (int r = 0; r < rows; ++r)
      for (int c = 0; c < ld; ++c)
        ASSERT_EQ(out[r * ld + c], c < d ? static_cast<float>(100 * r + c) : 0.0f);
  }
}

/// Nearest 16-bit pattern with ties to even, found among the neighbours of a truncated guess.
void expect_nearest(Dtype dtype, float x, uint16_t stored) {
  const double got = value_of(dtype, stored);
  if (std::isnan(x)) {
    EXPECT_TRUE(std::isnan(got));
    return;
  }
  EXPECT_EQ(std::signbit(got), std::signbit(x)) << x;
  const double largest = value_of(dtype, dtype == Dtype::bf16 ? 0x7f7f : 0x7bff);
  const double half_step = (largest - value_of(dtype, dtype == Dtype::bf16 ? 0x7f7e : 0x7bfe)) / 2;
  if (std::fabs(static_cast<double>(x)) >= largest + half_step) {
    EXPECT_TRUE(std::isinf(got)) << x;
    return;
  }
  const uint16_t magnitude = stored & 0x7fff;
  const double error = std::fabs(std::fabs(static_cast<double>(x)) - value_of(dtype, magnitude));
  for (int step : {-1, 1}) {
    if (magnitude == 0 && step < 0) continue;
    const double neighbour = value_of(dtype, static_cast<uint16_t>(magnitude + step));
    if (std::isinf(neighbour)) continue;
    const double other = std::fabs(std::fabs(static_cast<double>(x)) - neighbour);
    EXPECT_TRUE(error < other || (error == other && magnitude % 2 == 0))
        << dtype_name(dtype) << " " << x << " stored as " << got;
  }
}

TEST_P(Prepare, StoresTheNearestValue) {
  Random random(3);
  std::vector<float> x = {0.0f,       -0.0f,    kInf,        -kInf,      std::nanf(""), 65504.0f,
                          65519.9f,   65520.0f, 3.4e38f,     -3.4e38f,   0x1p-24f,      0x1p-25f,
                          0x1.8p-25f, 0x1p-14f, 1.00390625f, 1.01171875f};
  while (x.size() < 4096)
    x.push_back(std::ldexp(random.between(-2.0f, 2.0f), static_cast<int>(random.integer(-26, 17))));
  while (x.size() < 8192)  // ties of bf16 and of f16
    x.push_back(std::ldexp(static_cast<float>(2 * random.integer(0, 4095) + 1),
                           static_cast<int>(random.integer(-30, 3))));
  for (Dtype dtype : {Dtype::bf16, Dtype::f16}) {
    std::vector<uint16_t> out(x.size());
    kernels().store_rows(dtype, out.data(), 256, 32, 256, x.data(), 256, 1.0f);
    for (size_t i = 0; i < x.size() && !HasFailure(); ++i) expect_nearest(dtype, x[i], out[i]);
  }
}

TEST_P(Prepare, StoreScalesAndLeavesGapsAlone) {
  const int d = 24, ld = 32, stride = 37, rows = 6;
  std::vector<float> x(static_cast<size_t>(rows * ld)),
      out(static_cast<size_t>(rows * stride), 9.0f);
  for (size_t i = 0; i < x.size(); ++i) x[i] = static_cast<float>(i) - 50.0f;
  kernels().store_rows(Dtype::f32, out.data(), stride, rows, d, x.data(), ld, 0.125f);
  for (int r = 0; r < rows; ++r)
    for (int c = 0; c < stride; ++c)
      ASSERT_EQ(out[r * stride + c], c < d ? x[r * ld + c] * 0.125f : 9.0f) << r << ", " << c;
}

TEST_P(Prepare, SumLeavesOutRowsThatAreNotFinite) {
  const int ld = 32, rows = 5, d = 24;
  std::vector<float> x(static_cast<size_t>(rows * ld), 0.0f);
  for (int r = 0; r < rows; ++r)
    for (int c = 0; c < d; ++c)
      x[r * ld + c] = static_cast<float>(r + 1) + 0.001f * static_cast<float>(c);
  x[1 * ld + 23] = kInf;
  x[3 * ld + 0] = -std::nanf("");
  std::vector<double> sum(ld, 10.0);
  EXPECT_EQ(kernels().sum_rows(x.data(), ld, rows, d, sum.data()), 3);
  for (int c = 0; c < d; ++c) {
    double want = 10.0;
    for (int r : {0, 2, 4}) want += static_cast<double>(x[r * ld + c]);
    EXPECT_EQ(sum[c], want);
  }
  for (int c = d; c < ld; ++c) EXPECT_EQ(sum[c], 10.0);
}

/// Rows that range over the whole of FP32, with zeros, subnormals, ties, NaN and Inf among them.
std::vector<float> hard_rows(int rows, int ld, Random& random) {
  std::vector<float> x(static_cast<size_t>(rows * ld));
  for (int r = 0; r < rows; ++r) {
    const int exponent = static_cast<int>(random.integer(-130, 120));
    for (int c = 0; c < ld; ++c) x[r * ld + c] = std::ldexp(random.between(-1.0f, 1.0f), exponent);
    if (r % 8 == 1) std::fill_n(&x[r * ld], ld, 0.0f);
    if (r % 8 == 2) x[r * ld + random.integer(0, ld - 1)] = r % 16 == 2 ? std::nanf("") : -kInf;
    if (r % 8 == 3)  // 127 is the largest: codes fall on halves exactly
      for (int c = 0; c < ld; ++c)
        x[r * ld + c] = c == 0 ? 127.0f : static_cast<float>(random.integer(-253, 253)) / 2;
    if (r % 8 == 4) std::fill_n(&x[r * ld], ld, r % 16 == 4 ? 0x1p-100f : 0x1.fffffep-101f);
  }
  return x;
}

TEST_P(Prepare, MagnitudesAndCodesAreBitEqualToTheScalarQuantiser) {
  Random random(5);
  for (int ld : {16, 48, 64, 256})
    for (int repeat = 0; repeat < 4; ++repeat) {
      const int rows = 61, ldc = ld + 13;
      const std::vector<float> x = hard_rows(rows, ld, random);
      std::vector<float> amax(rows, -1.0f), scale(rows);
      kernels().row_magnitudes(x.data(), ld, rows, amax.data());
      for (int r = 0; r < rows; ++r) {
        float want = 0.0f;
        bool finite = true;
        for (int c = 0; c < ld; ++c) {
          finite = finite && std::isfinite(x[r * ld + c]);
          want = std::fmax(want, std::fabs(x[r * ld + c]));
        }
        if (finite) {
          ASSERT_EQ(amax[r], want) << "row " << r;
        } else {
          ASSERT_FALSE(std::isfinite(amax[r])) << "row " << r;
        }
        scale[r] = numerics::scale_of(amax[r]);
      }

      std::vector<int8_t> codes(static_cast<size_t>(rows * ldc), 99);
      kernels().encode_rows(x.data(), ld, rows, scale.data(), codes.data(), ldc);
      for (int r = 0; r < rows; ++r) {
        const float s = scale[r];
        for (int c = 0; c < ld; ++c) {
          const int want =
              std::isnan(s) ? 0 : numerics::code_nearest(x[r * ld + c], numerics::inverse_of(s));
          ASSERT_EQ(codes[r * ldc + c], want)
              << "row " << r << " column " << c << " value " << x[r * ld + c] << " scale " << s;
          ASSERT_LE(std::abs(want), 127);
        }
        for (int c = ld; c < ldc; ++c) ASSERT_EQ(codes[r * ldc + c], 99) << "past the row";
      }
    }
}

TEST_P(Prepare, RotationIsBitEqualToTheScalarOne) {
  Random random(6);
  for (int d = 8; d <= 256; d += 8) {
    const int ld = (d + 15) / 16 * 16 + 16, rows = 3;
    std::vector<float> x(static_cast<size_t>(rows * ld), 0.0f);
    for (int r = 0; r < rows; ++r)
      for (int c = 0; c < d; ++c) x[r * ld + c] = random.between(-2.0f, 2.0f);
    for (bool back : {false, true}) {
      std::vector<float> want = x, got = x;
      for (int r = 0; r < rows; ++r)
        back ? numerics::rotate_back(&want[r * ld], d) : numerics::rotate(&want[r * ld], d);
      (back ? kernels().rotate_rows_back : kernels().rotate_rows)(got.data(), ld, rows, d);
      for (int i = 0; i < rows * ld; ++i)
        ASSERT_EQ(got[i], want[i]) << "d " << d << " at " << i << (back ? " back" : " forth");
    }
  }
}

/// A scale that rows share, or one with a floor, is larger than the row's own.
TEST_P(Prepare, CodesFollowTheScaleTheyAreGiven) {
  const std::vector<float> x(4 * 16, 1.5f);
  const std::vector<float> scale = {1.5f / 127, 0.5f, 3.0f, 0.0f};
  std::vector<int8_t> codes(4 * 16);
  kernels().encode_rows(x.data(), 16, 4, scale.data(), codes.data(), 16);
  for (int c = 0; c < 16; ++c) {
    EXPECT_EQ(codes[c], 127);
    EXPECT_EQ(codes[16 + c], 3);
    EXPECT_EQ(codes[32 + c], 0);  // a tie, to even
    EXPECT_EQ(codes[48 + c], 0);
  }
}

TEST_P(Prepare, ArithmeticOnRows) {
  Random random(7);
  const int ld = 48, rows = 5, n = rows * ld;
  std::vector<float> x(n), y(n), row(ld);
  for (auto* values : {&x, &y, &row})
    for (float& v : *values) v = random.between(-2.0f, 2.0f);

  std::vector<float> less = x, sum = x;
  kernels().subtract_row(less.data(), ld, rows, row.data());
  kernels().add_values(y.data(), n, sum.data());
  std::vector<double> apart(rows), alike(rows);
  kernels().row_dots(x.data(), ld, rows, y.data(), ld, apart.data());
  kernels().row_dots(x.data(), ld, rows, y.data(), 0, alike.data());
  for (int r = 0; r < rows; ++r) {
    double want_apart = 0, want_alike = 0;
    for (int c = 0; c < ld; ++c) {
      const int i = r * ld + c;
      ASSERT_EQ(less[i], x[i] - row[c]);
      ASSERT_EQ(sum[i], x[i] + y[i]);
      want_apart += static_cast<double>(x[i]) * y[i];
      want_alike += static_cast<double>(x[i]) * y[c];
    }
    EXPECT_NEAR(apart[r], want_apart, 1e-12);
    EXPECT_NEAR(alike[r], want_alike, 1e-12);
  }
}

std::vector<int8_t> random_codes(size_t n, Random& random) {
  std::vector<int8_t> x(n);
  for (int8_t& c : x) c = static_cast<int8_t>(random.integer(-127, 127));
  return x;
}

TEST_P(Prepare, LayoutsFollowTheirFormulas) {
  Random random(9);
  struct Size {
    int rows, cols;
  };
  for (const Size& s : {Size{16, 16}, Size{64, 48}, Size{128, 256}, Size{256, 64}}) {
    const int ldc = s.cols + 21, ldd = s.rows + 16;
    const std::vector<int8_t> x = random_codes(static_cast<size_t>(s.rows * ldc), random);
    const auto at = [&](int r, int c) { return x[r * ldc + c]; };
    const size_t size = static_cast<size_t>(s.rows * s.cols);

    std::vector<int8_t> along_rows(size), along_columns(size);
    kernels().pack_along_rows(x.data(), ldc, s.rows, s.cols, along_rows.data());
    kernels().pack_along_columns(x.data(), ldc, s.rows, s.cols, along_columns.data());
    for (int r = 0; r < s.rows; ++r)
      for (int c = 0; c < s.cols; ++c) {
        ASSERT_EQ(along_rows[((r / 16 * (s.cols / 4) + c / 4) * 16 + r % 16) * 4 + c % 4],
                  at(r, c));
        ASSERT_EQ(along_columns[((c / 16 * (s.rows / 4) + r / 4) * 16 + c % 16) * 4 + r % 4],
                  at(r, c));
      }

    std::vector<float> decoded(size);
    std::vector<int32_t> row_sums(s.rows), column_sums(s.cols);
    kernels().decode_rows(x.data(), ldc, s.rows, s.cols, decoded.data());
    kernels().sum_row_codes(x.data(), ldc, s.rows, s.cols, row_sums.data());
    kernels().sum_column_codes(x.data(), ldc, s.rows, s.cols, column_sums.data());
    for (int r = 0; r < s.rows; ++r)
      for (int c = 0; c < s.cols; ++c) {
        ASSERT_EQ(decoded[r * s.cols + c], at(r, c));
        row_sums[r] -= at(r, c);
        column_sums[c] -= at(r, c);
      }
    for (const auto* left : {&row_sums, &column_sums})
      for (int32_t rest : *left) ASSERT_EQ(rest, 0);

    if (s.rows % 64 == 0) {
      std::vector<int8_t> t(static_cast<size_t>(s.cols * ldd), 55);
      kernels().transpose_codes(x.data(), ldc, s.rows, s.cols, t.data(), ldd);
      for (int c = 0; c < s.cols; ++c)
        for (int r = 0; r < ldd; ++r) ASSERT_EQ(t[c * ldd + r], r < s.rows ? at(r, c) : 55);
    }

    std::vector<float> f(static_cast<size_t>(s.rows * ldc)),
        ft(static_cast<size_t>(s.cols * ldd), 5.5f);
    for (float& v : f) v = random.unit();
    kernels().transpose_f32(f.data(), ldc, s.rows, s.cols, ft.data(), ldd);
    for (int c = 0; c < s.cols; ++c)
      for (int r = 0; r < ldd; ++r) ASSERT_EQ(ft[c * ldd + r], r < s.rows ? f[r * ldc + c] : 5.5f);
  }
}

SAGE_FOR_KERNEL_TABLES(Prepare);

}  // namespace
}  // namespace sagebwd::testing
