// SPDX-License-Identifier: Apache-2.0
// Inputs that INT8 represents without loss. Codes are exact, P is one-hot or one half, scales
// are powers of two, so that the result must equal FP64 to one unit in the last place. What is left
// to go wrong is indexing. Rotated channels are no multiples of a scale, so Q and K are not
// rotated.
#include <gtest/gtest.h>

#include <cmath>
#include <limits>

#include "support/attention_problem.h"
#include "support/compare.h"
#include "support/implementations.h"
#include "support/random.h"

namespace sagebwd::testing {
namespace {

constexpr double kUlp = 0x1p-23;
// Terms are multiples of 127 or more, so a wrong index is a large error; sums that cancel may leave
// one unit of their terms.
constexpr double kCancelled = 1e-5;

/// Keys are ±127 along one channel each, in pairs of opposite sign, so that their mean is zero; the
/// query of a key is 64 times larger than needed to leave the others below the smallest exp2.
AttentionProblem one_hot(const std::string& text) {
  AttentionProblem p = make_problem(text);
  Random random(31);
  const spec::AttnCase& c = p.c;
  for (auto* x : {&p.in.q, &p.in.k, &p.in.v, &p.in.dout}) std::fill(x->begin(), x->end(), 0.0f);
  const auto direction = [&](int64_t key) {
    return std::pair<int64_t, float>(key / 2 % c.d, key % 2 == 0 ? 127.0f : -127.0f);
  };
  for (int64_t bh = 0; bh < c.b * c.hk; ++bh)
    for (int64_t j = 0; j < c.nk; ++j) {
      const auto [channel, sign] = direction(j);
      p.in.k[(bh * c.nk + j) * c.d + channel] = sign;
      // Values in pairs of opposite sign as well: 127 and smaller numbers, times the scale that
      // the pair is to have.
      const bool per_token = c.recipe.scheme != Scheme::paper;
      const float scale = per_token ? std::ldexp(1.0f, static_cast<int>(random.integer(-9, 0))) : 1;
      for (int n = 0; n < 3 && j % 2 == 0; ++n) {
        const int64_t at = (bh * c.nk + j) * c.d + random.integer(0, c.d / 4 - 1) * 4 + n;
        p.in.v[at] = scale * static_cast<float>(n == 0 ? 127 : random.integer(-126, 126));
        p.in.v[at + c.d] = -p.in.v[at];
      }
    }
  p.dlse.assign(static_cast<size_t>(c.b * c.h * c.nq), 0.0f);
  for (int64_t bh = 0; bh < c.b * c.h; ++bh)
    for (int64_t i = 0; i < c.nq; ++i) {
      const auto [channel, sign] = direction(random.integer(0, c.nk - 1));
      p.in.q[(bh * c.nq + i) * c.d + channel] = sign;
      p.in.dout[(bh * c.nq + i) * c.d + random.integer(0, c.d - 1)] =
          random.chance(0.5) ? 127 : -127;
      p.dlse[bh * c.nq + i] = std::ldexp(random.chance(0.5) ? 1.0f : -1.0f, 4);
    }
  return p;
}

class Lossless : public PerImplementation {};

/// With one-hot P only dLSE makes dS, and it makes it exact: dQ = c·dLSE·k and dK = c·Σ dLSE·q.
/// Codes of P would leave a unit in the last place of O, hence of D, which is larger than dLSE.
TEST_P(Lossless, OneHotProbabilities) {
  for (const char* text : {"b2 h4 hk2 nq100 nk128 d64 f32 rotate=off lift=O",
                           "h2 nq150 nk64 d32 f32 tile=64x64 rotate=off lift=O",
                           "h2 nq150 nk128 d64 f32 tile=64x64 smooth_k=off rotate=off lift=O",
                           "h2 n128 d64 f32 paper lift=O"}) {
    const AttentionProblem p = one_hot(text);
    const Results got = run(impl(), p);
    const Exact want = exact(p);
    EXPECT_TRUE(elementwise("O", got.o, want.o, p.q_shape(), 0, kUlp, p));
    EXPECT_TRUE(elementwise("LSE", got.lse, want.lse, p.row_shape(), 0, kUlp, p));
    EXPECT_TRUE(elementwise("dV", got.dv, want.dv, p.k_shape(), kCancelled, kUlp, p));
    EXPECT_TRUE(elementwise("dQ", got.dq, want.dq, p.q_shape(), kCancelled, kUlp, p));
    EXPECT_TRUE(elementwise("dK", got.dk, want.dk, p.k_shape(), kCancelled, 2 * kUlp, p));
  }
}

/// Codes of P are exact too: one is the largest code.
TEST_P(Lossless, CodesOfOneHotProbabilities) {
  for (const char* text :
       {"b2 h4 hk2 nq100 nk128 d64 f32 rotate=off", "h2 nq150 nk128 d64 f32 tile=64x64 rotate=off",
        "h2 n128 d64 f32 paper"}) {
    const AttentionProblem p = one_hot(text);
    const Results got = run(impl(), p);
    const Exact want = exact(p);
    EXPECT_TRUE(elementwise("O", got.o, want.o, p.q_shape(), 0, 2 * kUlp, p));
    EXPECT_TRUE(elementwise("LSE", got.lse, want.lse, p.row_shape(), 0, kUlp, p));
    EXPECT_TRUE(elementwise("dV", got.dv, want.dv, p.k_shape(), kCancelled, kUlp, p));
  }
}

/// Two equal keys share each row: P is one half, dS = ±(dP1 - dP2)/4, and dQ cancels to exact zero.
TEST_P(Lossless, TwoEqualKeys) {
  AttentionProblem p = one_hot("h2 nq32 nk128 d64 f32 smooth_k=off rotate=off lift=O");
  p.dlse.clear();
  const spec::AttnCase& c = p.c;
  std::fill(p.in.q.begin(), p.in.q.end(), 0.0f);
  std::fill(p.in.dout.begin(), p.in.dout.end(), 0.0f);
  for (int64_t h = 0; h < c.h; ++h) {
    // Keys 2m and 2m + 1 both point along channel m; query i asks for pair i, with its own sign of
    // dO.
    for (int64_t j = 0; j < c.nk; ++j)
      for (int64_t ch = 0; ch < c.d; ++ch) {
        p.in.k[(h * c.nk + j) * c.d + ch] = ch == j / 2 ? 127.0f : 0.0f;
        p.in.v[(h * c.nk + j) * c.d + ch] = ch == 5 ? (j % 2 == 0 ? 127.0f : -127.0f) : 0.0f;
      }
    for (int64_t i = 0; i < c.nq; ++i) {
      p.in.q[(h * c.nq + i) * c.d + i] = 127.0f;
      p.in.dout[(h * c.nq + i) * c.d + 5] = i % 2 == 0 ? 127.0f : -127.0f;
    }
  }
  const Results got = run(impl(), p);
  const Exact want = exact(p);
  EXPECT_TRUE(elementwise("O", got.o, want.o, p.q_shape(), 0, kUlp, p));
  EXPECT_TRUE(elementwise("LSE", got.lse, want.lse, p.row_shape(), 0, kUlp, p));
  EXPECT_TRUE(elementwise("dV", got.dv, want.dv, p.k_shape(), kCancelled, kUlp, p));
  EXPECT_TRUE(elementwise("dK", got.dk, want.dk, p.k_shape(), kCancelled, 2 * kUlp, p));
  for (float x : got.dq) ASSERT_EQ(x, 0.0f);
  double size = 0;
  for (double x : want.dk) size = std::max(size, std::fabs(x));
  EXPECT_GT(size, 1000.0) << "the problem has a gradient to get right";
}

SAGE_FOR_ALL_IMPLEMENTATIONS(Lossless);

}  // namespace
}  // namespace sagebwd::testing
