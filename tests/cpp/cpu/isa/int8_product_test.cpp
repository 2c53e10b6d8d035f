// SPDX-License-Identifier: Apache-2.0
// The INT8 products against plain integer arithmetic. Scales are powers of two and start values
// small integers, so every result is exact and must be equal, bit for bit.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <functional>
#include <vector>

#include "support/implementations.h"
#include "support/random.h"

namespace sagebwd::testing {
namespace {

using cpu::isa::Int8Product;
using cpu::isa::Kernels;
using cpu::isa::kPanel;

constexpr int kGap = 32;  // bytes or elements between rows, which must not matter

/// How the codes of an operand are drawn.
enum class Codes { random, all_max, all_min, alternating };
constexpr Codes kAllCodes[] = {Codes::random, Codes::all_max, Codes::all_min, Codes::alternating};

struct Operands {
  int m, n, k;
  std::vector<int> left, right;  // [m][k], [k][n], as numbers

  /// Signed codes are in ±127, unsigned ones (P) in 0 … 127.
  Operands(int m_, int n_, int k_, bool left_signed, bool right_signed, Codes codes, Random& random)
      : m(m_), n(n_), k(k_) {
    const auto draw = [&](bool is_signed, int index) -> int {
      const int low = is_signed ? -127 : 0;
      switch (codes) {
        case Codes::all_max:
          return 127;
        case Codes::all_min:
          return low;
        case Codes::alternating:
          return index % 2 == 0 ? 127 : low;
        case Codes::random:
          break;
      }
      return static_cast<int>(random.integer(low, 127));
    };
    for (int i = 0; i < m * k; ++i) left.push_back(draw(left_signed, i));
    for (int i = 0; i < k * n; ++i) right.push_back(draw(right_signed, i / n));
  }

  int sum(int i, int j) const {
    int s = 0;
    for (int t = 0; t < k; ++t) s += left[i * k + t] * right[t * n + j];
    return s;
  }
  /// Row-major with a gap of junk behind each row.
  std::vector<uint8_t> left_bytes(uint8_t flip) const {
    std::vector<uint8_t> out(static_cast<size_t>(m * (k + kGap)), 0x7B);
    for (int i = 0; i < m; ++i)
      for (int t = 0; t < k; ++t)
        out[i * (k + kGap) + t] = static_cast<uint8_t>(left[i * k + t] ^ flip);
    return out;
  }
  /// [n/16][k/4][16][4]
  std::vector<uint8_t> right_panels() const {
    std::vector<uint8_t> out;
    for (int panel = 0; panel < n; panel += kPanel)
      for (int t = 0; t < k; t += 4)
        for (int column = 0; column < kPanel; ++column)
          for (int r = 0; r < 4; ++r)
            out.push_back(static_cast<uint8_t>(right[(t + r) * n + panel + column]));
    return out;
  }
  /// What a flipped left operand wants the accumulators to start at, plus `extra`.
  std::vector<int32_t> start(uint8_t flip, const std::vector<int32_t>& extra) const {
    std::vector<int32_t> out = extra;
    for (int j = 0; j < n; ++j)
      for (int t = 0; t < k; ++t) out[j] -= flip * right[t * n + j];
    return out;
  }
};

/// Powers of two of either sign.
std::vector<float> powers_of_two(int n, Random& random) {
  std::vector<float> x;
  for (int i = 0; i < n; ++i)
    x.push_back(
        std::ldexp(random.chance(0.5) ? 1.0f : -1.0f, static_cast<int>(random.integer(-3, 3))));
  return x;
}

std::vector<float> small_integers(int n, Random& random) {
  std::vector<float> x;
  for (int i = 0; i < n; ++i) x.push_back(static_cast<float>(random.integer(-64, 64)));
  return x;
}

struct Size {
  int m, n, k;
};
// Whole register blocks, leftovers of one, two and three panels, and the largest tiles.
const std::vector<Size> kSizes = {{4, 16, 64},   {8, 32, 64},    {16, 48, 128},  {64, 64, 64},
                                  {12, 80, 192}, {128, 112, 64}, {256, 256, 256}};

class Int8Products : public PerKernelTable {
 protected:
  using Body = std::function<void(const Operands&, Random&)>;
  void for_all(bool left_signed, bool right_signed, const Body& body) {
    Random random(7);
    for (const Size& s : kSizes)
      for (Codes codes : kAllCodes) {
        const Operands x(s.m, s.n, s.k, left_signed, right_signed, codes, random);
        SCOPED_TRACE(::testing::Message() << "m " << s.m << " n " << s.n << " k " << s.k
                                          << " codes " << static_cast<int>(codes));
        body(x, random);
        if (HasFailure()) return;
      }
  }
};

TEST_P(Int8Products, StoreSignedSigned) {
  for_all(true, true, [&](const Operands& x, Random& random) {
    const std::vector<uint8_t> left = x.left_bytes(kernels().flip), right = x.right_panels();
    std::vector<int32_t> extra(static_cast<size_t>(x.n), 0);
    for (int32_t& e : extra) e = static_cast<int32_t>(random.integer(-1000, 1000));
    const std::vector<int32_t> start = x.start(kernels().flip, extra);
    const int ldc = x.n + kGap;
    std::vector<int32_t> c(static_cast<size_t>(x.m * ldc), 12345);
    kernels().store_ss({x.m, x.n, x.k, left.data(), x.k + kGap, right.data(), start.data()},
                       c.data(), ldc);
    for (int i = 0; i < x.m; ++i) {
      for (int j = 0; j < x.n; ++j)
        ASSERT_EQ(c[i * ldc + j], x.sum(i, j) + extra[j]) << i << ", " << j;
      for (int j = x.n; j < ldc; ++j) ASSERT_EQ(c[i * ldc + j], 12345) << "gap of row " << i;
    }
  });
}

TEST_P(Int8Products, StoreWithoutStartWhereNothingIsFlipped) {
  if (kernels().flip != 0) GTEST_SKIP() << "these kernels always need a start";
  for_all(true, true, [&](const Operands& x, Random&) {
    const std::vector<uint8_t> left = x.left_bytes(0), right = x.right_panels();
    std::vector<int32_t> c(static_cast<size_t>(x.m * x.n), 12345);
    kernels().store_ss({x.m, x.n, x.k, left.data(), x.k + kGap, right.data(), nullptr}, c.data(),
                       x.n);
    for (int i = 0; i < x.m; ++i)
      for (int j = 0; j < x.n; ++j) ASSERT_EQ(c[i * x.n + j], x.sum(i, j)) << i << ", " << j;
  });
}

/// Runs an accumulating product and compares with `want(i, j, before)`.
void check_accumulated(const Operands& x, Random& random,
                       const std::function<void(float* c, int64_t ldc)>& product,
                       const std::function<float(int i, int j, float before)>& want) {
  const int ldc = x.n + kGap;
  const std::vector<float> before = small_integers(x.m * ldc, random);
  std::vector<float> c = before;
  product(c.data(), ldc);
  for (int i = 0; i < x.m; ++i) {
    for (int j = 0; j < x.n; ++j)
      ASSERT_EQ(c[i * ldc + j], want(i, j, before[i * ldc + j])) << i << ", " << j;
    for (int j = x.n; j < ldc; ++j)
      ASSERT_EQ(c[i * ldc + j], before[i * ldc + j]) << "gap of row " << i;
  }
}

TEST_P(Int8Products, RowScaledUnsignedSigned) {
  for_all(false, true, [&](const Operands& x, Random& random) {
    const std::vector<uint8_t> left = x.left_bytes(0), right = x.right_panels();
    const std::vector<float> row = powers_of_two(x.m, random);
    check_accumulated(
        x, random,
        [&](float* c, int64_t ldc) {
          kernels().row_us({x.m, x.n, x.k, left.data(), x.k + kGap, right.data(), nullptr},
                           row.data(), c, ldc);
        },
        [&](int i, int j, float c) { return c + static_cast<float>(x.sum(i, j)) * row[i]; });
  });
}

TEST_P(Int8Products, RowScaledSignedSigned) {
  for_all(true, true, [&](const Operands& x, Random& random) {
    const std::vector<uint8_t> left = x.left_bytes(kernels().flip), right = x.right_panels();
    const std::vector<int32_t> start =
        x.start(kernels().flip, std::vector<int32_t>(static_cast<size_t>(x.n), 0));
    const std::vector<float> row = powers_of_two(x.m, random);
    check_accumulated(
        x, random,
        [&](float* c, int64_t ldc) {
          kernels().row_ss({x.m, x.n, x.k, left.data(), x.k + kGap, right.data(), start.data()},
                           row.data(), c, ldc);
        },
        [&](int i, int j, float c) { return c + static_cast<float>(x.sum(i, j)) * row[i]; });
  });
}

TEST_P(Int8Products, ColumnScaledSignedSigned) {
  for_all(true, true, [&](const Operands& x, Random& random) {
    const std::vector<uint8_t> left = x.left_bytes(kernels().flip), right = x.right_panels();
    const std::vector<int32_t> start =
        x.start(kernels().flip, std::vector<int32_t>(static_cast<size_t>(x.n), 0));
    const std::vector<float> column = powers_of_two(x.n, random);
    check_accumulated(
        x, random,
        [&](float* c, int64_t ldc) {
          kernels().column_ss({x.m, x.n, x.k, left.data(), x.k + kGap, right.data(), start.data()},
                              column.data(), c, ldc);
        },
        [&](int i, int j, float c) { return c + static_cast<float>(x.sum(i, j)) * column[j]; });
  });
}

TEST_P(Int8Products, BlendSignedUnsigned) {
  for_all(true, false, [&](const Operands& x, Random& random) {
    const std::vector<uint8_t> left = x.left_bytes(0), right = x.right_panels();
    const std::vector<float> alpha = powers_of_two(x.n, random), beta = powers_of_two(x.n, random);
    check_accumulated(
        x, random,
        [&](float* c, int64_t ldc) {
          kernels().blend_su({x.m, x.n, x.k, left.data(), x.k + kGap, right.data(), nullptr},
                             alpha.data(), beta.data(), c, ldc);
        },
        [&](int i, int j, float c) {
          return c * alpha[j] + static_cast<float>(x.sum(i, j)) * beta[j];
        });
  });
}

SAGE_FOR_KERNEL_TABLES(Int8Products);

}  // namespace
}  // namespace sagebwd::testing
