// SPDX-License-Identifier: Apache-2.0
// Inputs that are hard on a quantiser: sinks anywhere, outlier channels, heavy tails, sharp heads,
// delimiters. Budgets are 1.1 to 1.3 times the most that the default recipe measures, with 255
// levels of P; saturated heads, where the exact gradient nearly cancels, are judged beside 16-bit
// attention.
#include <gtest/gtest.h>

#include <cmath>
#include <cstdio>
#include <string>
#include <vector>

#include "support/attention_problem.h"
#include "support/compare.h"
#include "support/implementations.h"

namespace sagebwd::testing {
namespace {

using trace::InputKind;

const char* const kShapes[] = {"h2 n1024 d64 bf16", "h2 n1024 d64 bf16 causal",
                               "h2 n1024 d128 bf16", "h2 n1024 d128 bf16 causal"};

/// The best implementation here; P has as many levels as the hardware allows.
Results measure(const AttentionProblem& p, const Exact& want, InputKind kind) {
  const Results got = run(fastest(), p);
  std::printf("  %-13s %-50s O %.4f dQ %.4f dK %.4f dV %.4f bias dQ %.4f\n",
              trace::input_name(kind), p.describe().c_str(),
              error_stats(got.o, want.o, p.q_shape()).rel_l2,
              error_stats(got.dq, want.dq, p.q_shape()).rel_l2,
              error_stats(got.dk, want.dk, p.k_shape()).rel_l2,
              error_stats(got.dv, want.dv, p.k_shape()).rel_l2,
              error_stats(got.dq, want.dq, p.q_shape()).projection);
  return got;
}

struct FamilyCase {
  InputKind kind;
  Budgets budgets;
};
void PrintTo(const FamilyCase& c, std::ostream* out) { *out << trace::input_name(c.kind); }

class Families : public ::testing::TestWithParam<FamilyCase> {};

TEST_P(Families, StayWithinTheirBudgets) {
  for (const char* text : kShapes) {
    const AttentionProblem p = make_problem(text, GetParam().kind);
    const Exact want = exact(p);
    EXPECT_TRUE(accurate(measure(p, want, GetParam().kind), want, GetParam().budgets, p));
  }
}

// O .0173, dQ .0343, dK .0292, dV .0090.
constexpr Budgets kSink{.o = 0.022, .dq = 0.039, .dk = 0.035, .dv = 0.012};
// The sink is in the first block, whose centre is key 0: O .0202, dQ .0355, dK .0259, dV .0112.
constexpr Budgets kFirstBlockSink{.o = 0.025, .dq = 0.041, .dk = 0.032, .dv = 0.015};
// Four tiles have a key that is a hundred times stronger than the others, and few codes for them: O
// .0161, dQ .0381, dK .0182, dV .0107.
constexpr Budgets kFourSinks{.o = 0.021, .dq = 0.042, .dk = 0.023, .dv = 0.014};
// What is left of the gradient beside such a sink is small: O .0136, dQ .115, dK .128, dV .0074.
constexpr Budgets kStrongSink{.o = 0.018, .dq = 0.13, .dk = 0.145, .dv = 0.01};
// The gradient of the sink's own key is one row, and most of dK: O .0164, dQ .0337, dK .0344, dV
// .0135.
constexpr Budgets kLastSink{.o = 0.021, .dq = 0.039, .dk = 0.04, .dv = 0.017};
// O .0187, dQ .0294, dK .0232, dV .0188.
constexpr Budgets kChannels{.o = 0.024, .dq = 0.036, .dk = 0.029, .dv = 0.024};
// O .0341, dQ .0322, dK .0287, dV .0133.
constexpr Budgets kValueChannel{.o = 0.041, .dq = 0.038, .dk = 0.035, .dv = 0.017};
// O .0146, dQ .0381, dK .0340, dV .0146.
constexpr Budgets kHeavy{.o = 0.019, .dq = 0.046, .dk = 0.042, .dv = 0.019};
INSTANTIATE_TEST_SUITE_P(
    , Families,
    ::testing::Values(
        FamilyCase{InputKind::sink, kSink}, FamilyCase{InputKind::sink_127, kFirstBlockSink},
        FamilyCase{InputKind::sink_128, kSink}, FamilyCase{InputKind::sink_middle, kSink},
        FamilyCase{InputKind::sink_last, kLastSink}, FamilyCase{InputKind::sinks, kFourSinks},
        FamilyCase{InputKind::strong_sink, kStrongSink}, FamilyCase{InputKind::channels, kChannels},
        FamilyCase{InputKind::value_channel, kValueChannel}, FamilyCase{InputKind::heavy, kHeavy}),
    [](const auto& c) { return std::string(trace::input_name(c.param.kind)); });

/// The rounding of O to 16 bit is most of what is left, and 16-bit attention has that too. Rows of
/// all 1024 keys look at others a little more, and the error of an ordinary row comes on top.
TEST(SharpHeads, AreNearTo16BitAttention) {
  for (InputKind kind : {InputKind::previous, InputKind::one_hot})
    for (const char* text : kShapes) {
      const AttentionProblem p = make_problem(text, kind);
      const double most = kind == InputKind::one_hot ? 1.5 : p.c.mask.causal ? 2.0 : 3.2;
      const Exact want = exact(p), yardstick = bf16_attention(p);
      const Results got = measure(p, want, kind);
      const auto ratio = [&](const std::vector<float>& ours, const std::vector<double>& theirs,
                             const std::vector<double>& truth) {
        return error_stats(ours, truth, p.q_shape()).rel_l2 /
               error_stats({theirs.begin(), theirs.end()}, truth, p.q_shape()).rel_l2;
      };
      const double dq = ratio(got.dq, yardstick.dq, want.dq);
      const double dk = ratio(got.dk, yardstick.dk, want.dk);
      std::printf("    times the error of 16-bit attention: dQ %.2f dK %.2f\n", dq, dk);
      EXPECT_LE(dq, most) << trace::input_name(kind) << " " << text;
      EXPECT_LE(dk, most) << trace::input_name(kind) << " " << text;
    }
}

/// A dominant key in every tile. The dQ operand has one scale for a tile of keys, which keeps their
/// length out of dS, and dither of dQ's codes keeps what is smaller than half a code.
TEST(Delimiters, KeepTheGradientOfTheTail) {
  for (const char* text : {"h2 n1024 d64 bf16", "h2 n1024 d128 bf16"}) {
    const auto dq = [&](InputKind kind, const std::string& options) {
      const AttentionProblem p = make_problem(text + options, kind);
      const Exact want = exact(p);
      return error_stats(measure(p, want, kind).dq, want.dq, p.q_shape());
    };
    EXPECT_LE(dq(InputKind::delimiters6, "").rel_l2, 0.014) << text;  // .0112
    EXPECT_LE(dq(InputKind::delimiters7, "").rel_l2, 0.033) << text;
    EXPECT_LE(dq(InputKind::delimiters7, " rounding=dither:dQ").rel_l2, 0.02) << text;
    const trace::ErrorStats nearest = dq(InputKind::delimiters8, ""),
                            dithered = dq(InputKind::delimiters8, " rounding=dither:dQ");
    // What dither leaves is the error of D: O is a sum of values that nearly cancel, and the codes
    // of P that belong to the tail are about one.
    EXPECT_LT(dithered.rel_l2, 0.5 * nearest.rel_l2) << text;
    EXPECT_LT(std::fabs(dithered.projection), 0.03) << text;
    EXPECT_LT(nearest.projection, -0.08) << text;
  }
}

}  // namespace
}  // namespace sagebwd::testing
