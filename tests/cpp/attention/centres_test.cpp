// SPDX-License-Identifier: Apache-2.0
// Centres of V in recipe `vectorwise`: an offset that values share costs little, and the codes that
// a forward saves hold the oracle's centres, which are those of any prefix.
#include <gtest/gtest.h>

#include <cmath>
#include <memory>
#include <string>
#include <vector>

#include "numerics/octaves.h"
#include "sagebwd/attention.h"
#include "spec/codes.h"
#include "support/attention_problem.h"
#include "support/compare.h"
#include "support/implementations.h"
#include "support/tokens.h"

namespace sagebwd::testing {
namespace {

class Centres : public PerImplementation {};

constexpr float kOffset = 10.0f;

struct Errors {
  double o, dq;
};

/// Relative L2 distance of the later half of rows.
double distance(const std::vector<float>& got, const std::vector<double>& want) {
  double error = 0, size = 0;
  for (size_t i = got.size() / 2; i < got.size(); ++i)
    error += std::pow(got[i] - want[i], 2), size += want[i] * want[i];
  return std::sqrt(error / size);
}

/// Errors of O without what the offset adds to it, and of dQ, which an offset does not change.
Errors errors_of(const dispatch::Implementation& impl, const std::string& text, float offset) {
  AttentionProblem p = make_problem(text);
  const Exact want = exact(p);
  for (float& v : p.in.v) v += offset;
  Results got = run(impl, p);
  for (float& o : got.o) o -= offset;
  return {distance(got.o, want.o), distance(got.dq, want.dq)};
}

/// The first block has no centre: its share of a row keeps the error. Measured times the error
/// without an offset, with 255 levels of P and with 127: O 2.3, 2.7 and 2.7, 3.3 (full, causal), dQ
/// 1.2 at most. Without centres O 5.6 to 8.6, dQ 1.7 to 2.0.
TEST_P(Centres, AnOffsetOfVCostsLittle) {
  for (const char* text : {"h1 n1024 d64 f32", "h1 n1024 d64 f32 causal"}) {
    const Errors plain = errors_of(impl(), text, 0.0f), moved = errors_of(impl(), text, kOffset);
    const Errors without = errors_of(impl(), std::string(text) + " smooth_k=off", kOffset);
    EXPECT_LT(moved.o, 3.6 * plain.o) << text;
    EXPECT_LT(moved.dq, 1.3 * plain.dq) << text;
    EXPECT_GT(without.o, 5 * plain.o) << text;
    EXPECT_GT(without.dq, 1.6 * plain.dq) << text;
  }
}

/// The centres of V of a head, by octave: codes and scales.
struct Saved {
  std::vector<int8_t> codes;
  std::vector<float> scales;
};

/// What the forward writes of sequence t and key head hk. Memory holds noise before.
Saved saved_centres(const dispatch::Implementation& impl, const AttentionProblem& p, int64_t t,
                    int64_t hk) {
  const spec::AttnCase& c = p.c;
  std::vector<float> o(c.o_elements()), lse(c.b * c.h * c.nq);
  trace::Inputs in = p.in;
  ForwardArgs f;
  f.q = c.q_view(in.q.data()), f.k = c.k_view(in.k.data()), f.v = c.v_view(in.v.data());
  f.o = c.o_view(o.data()), f.lse = contiguous_stats(lse.data(), c.h, c.nq);
  f.mask = c.mask, f.recipe = c.recipe, f.documents = p.documents();
  std::vector<std::byte> codes(codes_size(f), std::byte{0x5A});
  f.codes = codes.data(), f.codes_bytes = codes.size();
  const spec::Problem problem = spec::resolve(f, true);
  const size_t bytes = impl.workspace(problem);
  std::vector<std::byte> memory(bytes + dispatch::kWorkspaceAlign);
  void* start = memory.data();
  size_t space = memory.size();
  std::align(dispatch::kWorkspaceAlign, bytes, start, space);
  impl.forward(problem, f, start);

  const spec::CodesView view(problem, codes.data());
  const int64_t dv = c.value_dim();
  Saved out;
  for (int octave = 0; octave < numerics::octaves_of(problem.sequence(t).nk); ++octave) {
    const int64_t row = hk * view.layout.key_blocks + spec::first_key_block(problem, t) +
                        numerics::first_block_of(octave);
    const int8_t* centre = view.v_centre8() + row * dv;
    out.codes.insert(out.codes.end(), centre, centre + dv);
    out.scales.push_back(view.v_centre_scale()[row]);
  }
  return out;
}

/// A problem whose values share an offset, of one sigma.
AttentionProblem with_offset(const std::string& text) {
  AttentionProblem p = make_problem(text);
  for (float& v : p.in.v) v += 1.0f;
  return p;
}

TEST_P(Centres, OfVAreSavedAsTheOracleHasThem) {
  for (const char* text : {"b2 h4 hk2 n600 d64 f32", "h2 hk1 n300 d80 dv=40 f32 causal"}) {
    AttentionProblem p = with_offset(text);
    if (p.c.b == 1) p.cu_q = p.cu_k = {0, 130, 130, 300};
    SCOPED_TRACE(p.describe());
    for (int64_t t = 0; t < p.num_sequences(); ++t)
      for (int64_t hk = 0; hk < p.c.hk; ++hk) {
        const ref::RecipeInputs in =
            ref::recipe_forward(one_head(impl(), p, t, hk * p.c.h / p.c.hk).head).inputs;
        const Saved got = saved_centres(impl(), p, t, hk);
        EXPECT_EQ(got.codes, in.v_centre8);
        EXPECT_EQ(got.scales, in.v_centre_scale);
        for (size_t octave = 0; octave < got.scales.size(); ++octave)
          EXPECT_EQ(got.scales[octave] > 0.0f, octave >= numerics::kFirstValueCentre);
      }
  }
}

TEST_P(Centres, OfAPrefixAreTheFirstOnes) {
  const AttentionProblem p = with_offset("h1 n600 d32 f32");
  const Saved all = saved_centres(impl(), p, 0, 0);
  for (int64_t n : {1, 128, 129, 256, 257, 513}) {
    AttentionProblem first = p;
    first.c.nk = n;
    first.in.k = tokens(p.in.k, 1, 600, 32, 0, n), first.in.v = tokens(p.in.v, 1, 600, 32, 0, n);
    const Saved some = saved_centres(impl(), first, 0, 0);
    EXPECT_TRUE(std::equal(some.codes.begin(), some.codes.end(), all.codes.begin())) << n;
    EXPECT_TRUE(std::equal(some.scales.begin(), some.scales.end(), all.scales.begin())) << n;
  }
}

/// Neither without smoothing, nor where the mean of the values is no more than chance.
TEST_P(Centres, AreZeroWhereTheyAreNotWanted) {
  for (const AttentionProblem& p :
       {with_offset("h1 n600 d32 f32 smooth_k=off"), make_problem("h1 n600 d32 f32")}) {
    SCOPED_TRACE(p.describe());
    const Saved got = saved_centres(impl(), p, 0, 0);
    EXPECT_EQ(got.codes, std::vector<int8_t>(4 * 32, 0));
    EXPECT_EQ(got.scales, std::vector<float>(4, 0.0f));
  }
}

SAGE_FOR_ALL_IMPLEMENTATIONS(Centres);

}  // namespace
}  // namespace sagebwd::testing
