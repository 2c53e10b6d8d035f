// SPDX-License-Identifier: Apache-2.0
#include "base/half.h"

#include <gtest/gtest.h>

#include <cmath>
#include <limits>

#include "base/dispatch_dtype.h"
#include "support/random.h"

namespace sagebwd {
namespace {

constexpr float kInf = std::numeric_limits<float>::infinity();
constexpr float kNan = std::numeric_limits<float>::quiet_NaN();

/// Value of a 16-bit code, from the definition of the format.
double value_of(uint32_t code, int mantissa_bits, int bias) {
  const int exponent_bits = 15 - mantissa_bits;
  const int exponent = static_cast<int>((code & 0x7fffu) >> mantissa_bits);
  const int mantissa = static_cast<int>(code & ((1u << mantissa_bits) - 1));
  double x;
  if (exponent == (1 << exponent_bits) - 1)
    x = mantissa == 0 ? std::numeric_limits<double>::infinity() : std::nan("");
  else if (exponent == 0)
    x = std::ldexp(mantissa, 1 - bias - mantissa_bits);
  else
    x = std::ldexp(mantissa + (1 << mantissa_bits), exponent - bias - mantissa_bits);
  return (code & 0x8000u) != 0 ? -x : x;
}

/// Nearest code by searching the neighbours of a sorted list: positive codes grow with their value.
uint32_t nearest_code(float x, int mantissa_bits, int bias) {
  const uint32_t sign = std::signbit(x) ? 0x8000u : 0u;
  const double a = std::fabs(static_cast<double>(x));
  const uint32_t infinity = ((1u << (15 - mantissa_bits)) - 1) << mantissa_bits;
  // Beyond the largest value the next code would stand for is taken as if the exponent went on.
  const auto value = [&](uint32_t code) {
    return code == infinity ? std::ldexp(1.0, (1 << (14 - mantissa_bits)))
                            : value_of(code, mantissa_bits, bias);
  };
  uint32_t low = 0, high = infinity;
  while (high - low > 1) {
    const uint32_t middle = (low + high) / 2;
    (value(middle) <= a ? low : high) = middle;
  }
  const double down = a - value(low), up = value(high) - a;
  const bool take_high = up < down || (up == down && (high & 1u) == 0);
  return sign | (take_high ? high : low);
}

TEST(Half, EveryF16CodeHasItsValueAndComesBack) {
  for (uint32_t code = 0; code < 65536; ++code) {
    const float x = to_float(f16{static_cast<uint16_t>(code)});
    const double want = value_of(code, 10, 15);
    if (std::isnan(want)) {
      ASSERT_TRUE(std::isnan(x)) << code;
      ASSERT_TRUE(std::isnan(to_float(from_float<f16>(x)))) << code;
      continue;
    }
    ASSERT_EQ(static_cast<double>(x), want) << code;
    ASSERT_EQ(std::signbit(x), (code & 0x8000u) != 0) << code;
    ASSERT_EQ(from_float<f16>(x).bits, code);
  }
}

TEST(Half, EveryBf16CodeHasItsValueAndComesBack) {
  for (uint32_t code = 0; code < 65536; ++code) {
    const float x = to_float(bf16{static_cast<uint16_t>(code)});
    const double want = value_of(code, 7, 127);
    if (std::isnan(want)) {
      ASSERT_TRUE(std::isnan(x)) << code;
      ASSERT_TRUE(std::isnan(to_float(from_float<bf16>(x)))) << code;
      continue;
    }
    ASSERT_EQ(static_cast<double>(x), want) << code;
    ASSERT_EQ(from_float<bf16>(x).bits, code);
  }
}

/// Random bit patterns cover all exponents; random numbers near the half range cover ties and
/// subnormals.
std::vector<float> hard_floats() {
  testing::Random random(7);
  std::vector<float> x = {0.0f,
                          -0.0f,
                          kInf,
                          -kInf,
                          65504.0f,
                          65519.99f,
                          65520.0f,
                          0x1p-24f,
                          0x1p-25f,
                          0x1.8p-25f,
                          0x1.000002p-25f,
                          0x1p-14f,
                          0x1.ffcp-15f,
                          0x1.ffep-15f,
                          0x1.fffp-15f,
                          std::numeric_limits<float>::max(),
                          -std::numeric_limits<float>::max(),
                          std::numeric_limits<float>::denorm_min()};
  for (int i = 0; i < 100000; ++i) {
    const float any = std::bit_cast<float>(static_cast<uint32_t>(random.bits()));
    if (!std::isnan(any)) x.push_back(any);
    x.push_back(std::ldexp(random.between(-1.0f, 1.0f), static_cast<int>(random.integer(-26, 18))));
    // Exactly between two neighbouring codes.
    const float code = to_float(f16{static_cast<uint16_t>(random.integer(0, 0x7bfe))});
    const float next = to_float(f16{static_cast<uint16_t>(from_float<f16>(code).bits + 1)});
    x.push_back(0.5f * (code + next));
    const uint32_t b = static_cast<uint32_t>(random.integer(0, 0x7f7e)) << 16;
    x.push_back(std::bit_cast<float>(b | 0x8000u));
  }
  return x;
}

TEST(Half, FloatsRoundToTheNearestCodeTiesToEven) {
  for (float x : hard_floats()) {
    ASSERT_EQ(from_float<bf16>(x).bits, nearest_code(x, 7, 127)) << std::hexfloat << x;
    ASSERT_EQ(from_float<f16>(x).bits, nearest_code(x, 10, 15)) << std::hexfloat << x;
  }
}

#ifdef __FLT16_MANT_DIG__
TEST(Half, F16AgreesWithTheCompiler) {
  for (float x : hard_floats())
    ASSERT_EQ(from_float<f16>(x).bits, std::bit_cast<uint16_t>(static_cast<_Float16>(x)))
        << std::hexfloat << x;
}
#endif

TEST(Half, NanStaysNan) {
  EXPECT_TRUE(std::isnan(to_float(from_float<f16>(kNan))));
  EXPECT_TRUE(std::isnan(to_float(from_float<bf16>(kNan))));
  // A NaN whose payload sits in the low bits only must not become infinity.
  const float low_payload = std::bit_cast<float>(0x7f800001u);
  EXPECT_TRUE(std::isnan(to_float(from_float<f16>(low_payload))));
  EXPECT_TRUE(std::isnan(to_float(from_float<bf16>(low_payload))));
}

TEST(Half, DtypeSelectsItsStorage) {
  const auto bytes = [](Dtype t) { return with_dtype(t, [](auto x) { return sizeof(x); }); };
  for (Dtype t : {Dtype::f32, Dtype::bf16, Dtype::f16})
    EXPECT_EQ(static_cast<int64_t>(bytes(t)), dtype_size(t)) << dtype_name(t);
  // 1 + 2^-9 tells the two 16-bit types apart: f16 keeps it, bf16 does not.
  const auto trip = [](Dtype t) {
    return with_dtype(t, [](auto x) { return to_float(from_float<decltype(x)>(1.001953125f)); });
  };
  EXPECT_EQ(trip(Dtype::f16), 1.001953125f);
  EXPECT_EQ(trip(Dtype::bf16), 1.0f);
}

}  // namespace
}  // namespace sagebwd
