// SPDX-License-Identifier: Apache-2.0
// Recipe `vectorwise`: under a causal mask no later token changes a bit of an earlier output, and a
// query's row depends on nothing but the query and the keys it sees. O and LSE only: gradients
// flow back in time.
#include <gtest/gtest.h>

#include <cstdlib>
#include <cstring>
#include <limits>
#include <string>
#include <vector>

#include "support/attention_problem.h"
#include "support/implementations.h"
#include "support/random.h"
#include "support/tokens.h"

namespace sagebwd::testing {
namespace {

/// O and LSE of queries [begin, end).
struct Rows {
  Rows(const AttentionProblem& p, const Results& r, int64_t begin, int64_t end)
      : o(tokens(r.o, p.c.b * p.c.h, p.c.nq, p.c.value_dim(), begin, end)),
        lse(tokens(r.lse, p.c.b * p.c.h, p.c.nq, 1, begin, end)) {}
  bool operator==(const Rows& other) const {
    const auto same = [](const std::vector<float>& a, const std::vector<float>& b) {
      return a.size() == b.size() && std::memcmp(a.data(), b.data(), a.size() * sizeof(float)) == 0;
    };
    return same(o, other.o) && same(lse, other.lse);
  }
  std::vector<float> o, lse;
};

Results forward(const dispatch::Implementation& impl, const AttentionProblem& p) {
  return run(impl, p, {.backward = false});
}

/// The problem of queries [q0, q1) and keys [k0, k1) alone.
AttentionProblem part(const AttentionProblem& p, int64_t q0, int64_t q1, int64_t k0, int64_t k1) {
  const spec::AttnCase& c = p.c;
  AttentionProblem one = p;
  one.cu_q.clear(), one.cu_k.clear();
  one.c.nq = q1 - q0, one.c.nk = k1 - k0;
  one.in.q = tokens(p.in.q, c.b * c.h, c.nq, c.d, q0, q1);
  one.in.k = tokens(p.in.k, c.b * c.hk, c.nk, c.d, k0, k1);
  one.in.v = tokens(p.in.v, c.b * c.hk, c.nk, c.value_dim(), k0, k1);
  one.in.dout = tokens(p.in.dout, c.b * c.h, c.nq, c.value_dim(), q0, q1);
  return one;
}

/// What may become of later tokens.
enum class Later { others, long_ones, huge, zeros, constant, nan, inf };
constexpr Later kLater[] = {Later::others,   Later::long_ones, Later::huge, Later::zeros,
                            Later::constant, Later::nan,       Later::inf};

/// Tokens from `cut` on of a contiguous [heads, n, d] tensor become something else.
void replace(std::vector<float>& x, int64_t heads, int64_t n, int64_t d, int64_t cut, Later later,
             Random& random) {
  for (int64_t h = 0; h < heads; ++h)
    for (int64_t at = (h * n + cut) * d; at < (h + 1) * n * d; ++at) {
      const float other = random.between(-2.0f, 2.0f);
      switch (later) {
        case Later::others:
          x[at] = other;
          break;
        case Later::long_ones:
          x[at] *= 20.0f;
          break;
        case Later::huge:
          x[at] = 1e4f * other;
          break;
        case Later::zeros:
          x[at] = 0.0f;
          break;
        case Later::constant:
          x[at] = 1.0f;
          break;
        case Later::nan:
          x[at] = std::numeric_limits<float>::quiet_NaN();
          break;
        case Later::inf:
          x[at] = random.chance(0.3) ? std::numeric_limits<float>::infinity() : other;
          break;
      }
    }
}

/// With tokens from `cut` on replaced, in the tensors that are named.
AttentionProblem with_other_future(const AttentionProblem& p, int64_t cut, Later later,
                                   const std::string& tensors, Random& random) {
  AttentionProblem q = p;
  const spec::AttnCase& c = p.c;
  const auto has = [&](char name) { return tensors.find(name) != std::string::npos; };
  if (has('q')) replace(q.in.q, c.b * c.h, c.nq, c.d, cut, later, random);
  if (has('k')) replace(q.in.k, c.b * c.hk, c.nk, c.d, cut, later, random);
  if (has('v')) replace(q.in.v, c.b * c.hk, c.nk, c.value_dim(), cut, later, random);
  q.round_inputs();
  return q;
}

class Causality : public PerImplementation {};

TEST_P(Causality, APrefixAloneHasTheBitsOfTheWhole) {
  for (const char* text : {"h2 hk1 n600 d64 bf16 causal", "h1 n1100 d32 f32 causal",
                           "h1 n300 d128 f16 causal window=70,-1", "h1 n300 d80 dv=40 causal",
                           "h1 n300 d64 causal smooth_k=off", "h1 n300 d64 causal softcap=5",
                           "h1 n300 d64 causal tile=128x64 rounding=dither seed5"}) {
    const AttentionProblem p = make_problem(text);
    const Results whole = forward(impl(), p);
    for (int64_t t : {1,   2,   15,  16,  17,  63,  64,  65,  127,  128,  129, 191,
                      192, 193, 255, 256, 257, 511, 512, 513, 1023, 1024, 1025}) {
      if (t >= p.c.nq) continue;
      const AttentionProblem first = part(p, 0, t, 0, t);
      ASSERT_EQ(Rows(first, forward(impl(), first), 0, t), Rows(p, whole, 0, t))
          << t << " tokens of " << p.describe();
    }
  }
}

TEST_P(Causality, LaterTokensChangeNoBit) {
  Random random(11);
  for (const char* text : {"h2 hk1 n300 d64 bf16 causal", "h1 n600 d32 f32 causal"}) {
    const AttentionProblem p = make_problem(text);
    const Results before = forward(impl(), p);
    for (int64_t cut : {1, 5, 64, 100, 128, 200, 256, 512})
      for (Later later : kLater)
        for (const char* tensors : {"q", "k", "v", "qkv"}) {
          if (cut >= p.c.nq) continue;
          const AttentionProblem other = with_other_future(p, cut, later, tensors, random);
          ASSERT_EQ(Rows(p, forward(impl(), other), 0, cut), Rows(p, before, 0, cut))
              << tensors << " from " << cut << ", kind " << static_cast<int>(later) << ", "
              << p.describe();
        }
  }
}

/// Scales and means of `paper` look ahead, whichever tensor changes: the tests above can fail.
TEST_P(Causality, PaperLooksAhead) {
  Random random(12);
  const AttentionProblem p = make_problem("h1 n300 d64 f32 causal paper");
  const Rows before(p, forward(impl(), p), 0, 150);
  for (const char* tensors : {"q", "k", "v", "qkv"}) {
    const AttentionProblem other = with_other_future(p, 150, Later::long_ones, tensors, random);
    EXPECT_FALSE(Rows(p, forward(impl(), other), 0, 150) == before) << tensors;
  }
  const AttentionProblem first = part(p, 0, 150, 0, 150);
  EXPECT_FALSE(Rows(first, forward(impl(), first), 0, 150) == before);
}

/// A small early value beside a large later one (TransformerEngine#3248): the early one stays.
TEST_P(Causality, SmallValuesSurviveLargeLaterOnes) {
  struct Case {
    float early, late;
    int64_t at;
  };
  for (const Case& c : {Case{0x1p-20f, 1.0f, 16}, Case{0x1p-10f, 1024.0f, 64},
                        Case{0x1p-24f, 1.0f, 8}, Case{0x1p-30f, 0x1p20f, 100}}) {
    AttentionProblem p = make_problem("h1 n128 d128 f32 causal");
    std::fill(p.in.q.begin(), p.in.q.end(), 1.0f);
    std::fill(p.in.k.begin(), p.in.k.end(), 1.0f);
    std::fill(p.in.v.begin(), p.in.v.end(), 0.0f);
    std::fill_n(p.in.v.begin(), p.c.d, c.early);
    const Results before = forward(impl(), p);
    std::fill_n(p.in.v.begin() + c.at * p.c.d, p.c.d, c.late);
    const Results after = forward(impl(), p);
    EXPECT_EQ(Rows(p, after, 0, c.at), Rows(p, before, 0, c.at)) << c.early << " " << c.late;
    EXPECT_NEAR(after.o[7 * 128], c.early / 8, 1e-2f * c.early);
  }
}

/// Large logits move the reference of a row; that may not move its neighbours'.
TEST_P(Causality, AQueryChangesItsOwnRowAlone) {
  for (const char* text : {"h1 n200 d64 f32 full", "h1 nq130 nk300 d64 bf16"}) {
    const AttentionProblem p = make_problem(text);
    const Results before = forward(impl(), p);
    for (int64_t i : {0, 9, 63, 64, 100})
      for (float factor : {0.0f, -3.0f, 50.0f, std::numeric_limits<float>::infinity()}) {
        AttentionProblem q = p;
        for (int64_t c = 0; c < p.c.d; ++c) q.in.q[i * p.c.d + c] *= factor;
        q.round_inputs();
        const Results after = forward(impl(), q);
        EXPECT_EQ(Rows(p, after, 0, i), Rows(p, before, 0, i)) << i << " times " << factor;
        EXPECT_EQ(Rows(p, after, i + 1, p.c.nq), Rows(p, before, i + 1, p.c.nq)) << i;
      }
  }
}

TEST_P(Causality, TheLastQueriesAloneHaveTheBitsOfTheWhole) {
  const AttentionProblem p = make_problem("h4 hk2 n400 d64 bf16 causal");
  const Results whole = forward(impl(), p);
  for (int64_t first : {1, 37, 64, 100, 128, 255, 256, 300, 399}) {
    const AttentionProblem last = part(p, first, 400, 0, 400);
    EXPECT_EQ(Rows(last, forward(impl(), last), 0, 400 - first), Rows(p, whole, first, 400))
        << first;
  }
}

TEST_P(Causality, ADocumentAloneHasTheBitsOfThePack) {
  AttentionProblem p = make_problem("h2 n700 d64 f32 causal");
  p.cu_q = p.cu_k = {0, 1, 130, 131, 300, 300, 700};
  const Results pack = forward(impl(), p);
  for (size_t t = 0; t + 1 < p.cu_q.size(); ++t) {
    const int64_t begin = p.cu_q[t], end = p.cu_q[t + 1];
    const AttentionProblem one = part(p, begin, end, begin, end);
    EXPECT_EQ(Rows(one, forward(impl(), one), 0, end - begin), Rows(p, pack, begin, end)) << t;
  }
}

/// The cause, and not the symptom: codes are those of the prefix.
TEST_P(Causality, CodesOfAPrefixAreTheFirstRows) {
  const AttentionProblem p = make_problem("h1 n700 d64 f32 causal");
  const OneHead whole = one_head(impl(), p, 0, 0);
  const ref::RecipeInputs all = ref::recipe_forward(whole.head).inputs;
  for (int64_t t : {1, 100, 128, 129, 300, 513}) {
    const OneHead first = one_head(impl(), part(p, 0, t, 0, t), 0, 0);
    const ref::RecipeInputs some = ref::recipe_forward(first.head).inputs;
    const auto starts = [](const auto& long_one, const auto& short_one) {
      return std::equal(short_one.begin(), short_one.end(), long_one.begin());
    };
    EXPECT_TRUE(starts(all.k8, some.k8) && starts(all.k_scale, some.k_scale)) << t;
    EXPECT_TRUE(starts(all.v8, some.v8) && starts(all.v_scale, some.v_scale)) << t;
    EXPECT_TRUE(starts(all.centre8, some.centre8) && starts(all.centre_scale, some.centre_scale));
    EXPECT_TRUE(starts(all.v_centre8, some.v_centre8) &&
                starts(all.v_centre_scale, some.v_centre_scale));
  }
}

/// NaN and Inf in V reach the rows that see them, whole rows, and not LSE.
TEST_P(Causality, ValuesThatAreNotFiniteMarkTheRowsThatSeeThem) {
  AttentionProblem p = make_problem("h1 n200 d32 f32 causal");
  p.in.v[150 * 32 + 7] = std::numeric_limits<float>::infinity();
  const Results r = forward(impl(), p);
  for (int64_t i = 0; i < 200; ++i) {
    EXPECT_TRUE(std::isfinite(r.lse[i])) << i;
    for (int64_t c = 0; c < 32; ++c) ASSERT_EQ(std::isnan(r.o[i * 32 + c]), i >= 150) << i;
  }
}

/// SAGEBWD_FUZZ_CASES sets how many.
TEST_P(Causality, FuzzOfRandomProblems) {
  const char* wanted = std::getenv("SAGEBWD_FUZZ_CASES");
  const int count = wanted != nullptr ? std::atoi(wanted) : 60;
  for (int n = 0; n < count; ++n) {
    Random random(static_cast<uint64_t>(1000 + n));
    const int64_t nq = random.integer(1, 400),
                  past = random.chance(0.3) ? random.integer(0, 300) : 0;
    const int64_t hk = random.integer(1, 2);
    const std::vector<int64_t> dims = {8, 24, 40, 64, 80, 128};
    std::string text = "h" + std::to_string(hk * random.integer(1, 2)) + " hk" +
                       std::to_string(hk) + " nq" + std::to_string(nq) + " nk" +
                       std::to_string(nq + past) + " d" + std::to_string(random.pick(dims)) +
                       " causal seed" + std::to_string(n);
    const std::vector<std::string> types = {" f32", " bf16", " f16"};
    text += random.pick(types);
    if (random.chance(0.2)) text += " window=" + std::to_string(random.integer(0, 300)) + ",-1";
    if (random.chance(0.2)) text += " smooth_k=off";
    if (random.chance(0.2)) text += " tile=64x64";
    if (random.chance(0.1)) text += " rounding=dither";
    const std::vector<trace::InputKind> kinds = {trace::InputKind::gaussian,
                                                 trace::InputKind::offset, trace::InputKind::heavy};
    const AttentionProblem p =
        make_problem(text, random.pick(kinds), static_cast<double>(random.between(0.3f, 6.0f)));
    const int64_t cut = random.integer(0, nq - 1);
    const Results before = forward(impl(), p);
    // Queries are the last of the keys.
    AttentionProblem other = p;
    const Later later = kLater[random.integer(0, 6)];
    replace(other.in.q, p.c.h, nq, p.c.d, cut, later, random);
    replace(other.in.k, p.c.hk, nq + past, p.c.d, cut + past, later, random);
    replace(other.in.v, p.c.hk, nq + past, p.c.d, cut + past, later, random);
    other.round_inputs();
    ASSERT_EQ(Rows(p, forward(impl(), other), 0, cut), Rows(p, before, 0, cut))
        << "tokens from " << cut << " on replaced, kind " << static_cast<int>(later) << ": "
        << p.describe();
    const AttentionProblem first = part(p, 0, cut, 0, cut + past);
    ASSERT_EQ(Rows(first, forward(impl(), first), 0, cut), Rows(p, before, 0, cut))
        << "the first " << cut << " queries of " << p.describe();
  }
}

SAGE_FOR_ALL_IMPLEMENTATIONS(Causality);

}  // namespace
}  // namespace sagebwd::testing
