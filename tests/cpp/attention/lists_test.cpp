// SPDX-License-Identifier: Apache-2.0
// Block-sparse attention through every implementation. Parity with the recipe oracle is tested in
// parity_test.cpp, threads in determinism_test.cpp, wrong lists in bad_input_test.cpp.
#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <numeric>
#include <vector>

#include "support/attention_problem.h"
#include "support/compare.h"
#include "support/implementations.h"

namespace sagebwd::testing {
namespace {

using trace::InputKind;

constexpr float kInf = std::numeric_limits<float>::infinity();

/// The problem with lists that all heads share: row r has the blocks of rows[r].
AttentionProblem with_rows(AttentionProblem p, const std::vector<std::vector<int32_t>>& rows,
                           int block_q, int block_k, int lead = 0) {
  trace::Lists& l = p.lists;
  l = {};
  for (const std::vector<int32_t>& row : rows)
    l.shape.width = std::max<int64_t>(l.shape.width, static_cast<int64_t>(row.size()));
  for (const std::vector<int32_t>& row : rows) {
    l.count.push_back(static_cast<int32_t>(row.size()));
    l.index.insert(l.index.end(), row.begin(), row.end());
    l.index.insert(l.index.end(), static_cast<size_t>(l.shape.width) - row.size(), -7);
  }
  l.shape.rows = static_cast<int64_t>(rows.size());
  l.shape.block_q = block_q, l.shape.block_k = block_k, l.shape.lead = lead;
  return p;
}

std::vector<int32_t> first_blocks(int64_t count) {
  std::vector<int32_t> blocks(static_cast<size_t>(count));
  std::iota(blocks.begin(), blocks.end(), 0);
  return blocks;
}

class Lists : public PerImplementation {};

TEST_P(Lists, OfAllBlocksAreDenseAttention) {
  for (const char* text :
       {"b2 h4 hk2 nq300 nk500 d64 tile=64x64", "h2 n333 d64 f32 causal tile=64x64",
        "h2 n333 d64 f32 tile=64x64 paper smooth_q=on", "h2 n333 d40 f16 paper window=100,20",
        "h1 n300 d64 tile=64x64 rounding=dither seed3"}) {
    const AttentionProblem dense = make_problem(text);
    const int64_t rows = (dense.c.nq + 127) / 128, blocks = (dense.c.nk + 63) / 64;
    const std::vector<std::vector<int32_t>> all(static_cast<size_t>(rows), first_blocks(blocks));
    EXPECT_EQ(first_difference(run(impl(), with_rows(dense, all, 128, 64)), run(impl(), dense)), "")
        << text;
  }
}

TEST_P(Lists, OfTheVisibleBlocksAreCausalAttention) {
  AttentionProblem dense = make_problem("h2 n700 d64 causal tile=64x128 f32");
  dense.dlse = random_rows(dense, 3);
  std::vector<std::vector<int32_t>> visible;
  for (int64_t row = 0; row < 6; ++row) visible.push_back(first_blocks(row + 1));
  EXPECT_EQ(first_difference(run(impl(), with_rows(dense, visible, 128, 128)), run(impl(), dense)),
            "");
}

/// Rows without entries are rows without keys, and so are rows whose blocks the mask hides.
TEST_P(Lists, EmptyRows) {
  AttentionProblem p = make_problem("h2 n300 d16 f32 causal tile=64x64");
  p.dlse = random_rows(p, 4);
  p = with_rows(p, {{1, 4}, {0}, {}, {4, 3}, {0, 4}}, 64, 64, 1);
  const Results got = run(impl(), p);
  const Exact want = exact(p);
  for (int64_t h = 0; h < 2; ++h)
    for (int64_t i = 0; i < 300; ++i) {
      const bool empty = i < 64 || (i >= 128 && i < 192);
      EXPECT_EQ(got.lse[h * 300 + i] == -kInf, empty) << i;
      for (int64_t c = 0; c < 16 && empty; ++c) {
        EXPECT_EQ(got.o[(h * 300 + i) * 16 + c], 0.0f);
        EXPECT_EQ(got.dq[(h * 300 + i) * 16 + c], 0.0f);
      }
    }
  EXPECT_TRUE(accurate(got, want, {.o = 0.03, .dq = 0.03, .dk = 0.04, .dv = 0.03}, p));
  // Key block 1 is listed where the mask hides it, block 2 nowhere.
  for (int64_t h = 0; h < 2; ++h)
    for (int64_t at = 64 * 16; at < 192 * 16; ++at) {
      ASSERT_EQ(got.dk[h * 300 * 16 + at], 0.0f);
      ASSERT_EQ(got.dv[h * 300 * 16 + at], 0.0f);
    }
  // No list has an entry.
  const Results none = run(impl(), with_rows(p, {{}, {}, {}, {}, {}}, 64, 64));
  for (float x : none.lse) ASSERT_EQ(x, -kInf);
  for (const auto* x : {&none.o, &none.dq, &none.dk, &none.dv})
    for (float value : *x) ASSERT_EQ(value, 0.0f);
}

TEST_P(Lists, AreAccurate) {
  struct {
    const char* text;
    bool packed = false;
  } const cases[] = {{"h4 hk2 nq500 nk900 d64 keep=0.2"},
                     {"h2 nq500 nk900 d128 keep=0.2 lists=mass f16"},
                     {"h2 n900 d64 keep=0.3 lists=skewed blocks=64x128 causal align=top_left"},
                     {"h2 n900 d64 keep=0.2 lists=diagonal causal"},
                     {"h2 hk1 nq700 nk900 d64 keep=0.3", true}};
  for (const auto& c : cases) {
    AttentionProblem p = make_problem(c.text);
    if (c.packed) {
      p.cu_q = {0, 1, 200, 200, 329, 700}, p.cu_k = {0, 100, 100, 101, 400, 900};
      p.make_lists();
    }
    EXPECT_TRUE(accurate(run(impl(), p), exact(p), {.o = .03, .dq = .03, .dk = .04, .dv = .03}, p));
  }
}

/// One key has most of every row. P·V in INT8 would lose the other keys of its tile, and D with
/// them; `lead` keeps that tile in floating point.
TEST(ListsOnHardInputs, TheLeadingEntryKeepsDominantKeysApart) {
  for (InputKind kind : {InputKind::sink, InputKind::dominant})
    for (const char* keep : {"0.09", "0.03"}) {
      const std::string text =
          "h1 nq512 nk4096 d64 f16 lists=mass keep=" + std::string(keep) + " lead=";
      const AttentionProblem p = make_problem(text + "1", kind),
                             none = make_problem(text + "0", kind);
      const Exact want = exact(p);
      const Results got = run(fastest(), p), without = run(fastest(), none);
      EXPECT_TRUE(accurate(got, want, {.o = .03, .dq = .045, .dk = .045, .dv = .03}, p));
      if (kind == InputKind::sink || std::string(keep) == "0.03") {
        EXPECT_FALSE(close("dQ", without.dq, want.dq, p.q_shape(), {.rel_l2 = .06}, p))
            << "lead has no work to do here: " << p.describe();
      }
    }
}

/// Tokens behind the end of a document belong to another one: whatever they hold, nothing of it
/// gets in. Lengths around the sizes of tiles and blocks.
TEST_P(Lists, IgnoreWhatLiesBehindTheEnd) {
  for (int64_t n : {1, 63, 64, 65, 127, 128, 129}) {
    const std::string text = "h2 n" + std::to_string(n + 70) + " d16 f32 keep=1 lists=random";
    AttentionProblem p = make_problem(text);
    p.cu_q = p.cu_k = {0, static_cast<int32_t>(n), static_cast<int32_t>(n + 70)};
    p.make_lists();
    const Results clean = run(impl(), p);
    for (float junk : {1e30f, std::numeric_limits<float>::quiet_NaN()}) {
      AttentionProblem dirty = p;
      for (std::vector<float>* x : {&dirty.in.q, &dirty.in.k, &dirty.in.v, &dirty.in.dout})
        for (int64_t h = 0; h < 2; ++h)
          std::fill_n(x->begin() + (h * (n + 70) + n) * 16, 70 * 16, junk);
      const Results got = run(impl(), dirty);
      for (int64_t h = 0; h < 2; ++h)
        for (int64_t at = h * (n + 70) * 16; at < (h * (n + 70) + n) * 16; ++at) {
          ASSERT_EQ(got.o[at], clean.o[at]) << n;
          ASSERT_EQ(got.dq[at], clean.dq[at]) << n;
          ASSERT_EQ(got.dk[at], clean.dk[at]) << n;
          ASSERT_EQ(got.dv[at], clean.dv[at]) << n;
        }
    }
  }
}

/// Keys outside the lists may hold anything, but their means take part in smoothing.
TEST_P(Lists, DoNotLookAtOtherBlocks) {
  AttentionProblem p =
      with_rows(make_problem("h1 nq128 nk300 d16 f32 smooth_k=off"), {{3, 0}}, 128, 64, 1);
  const Results clean = run(impl(), p);
  std::fill_n(p.in.k.begin() + 100 * 16, 16, std::numeric_limits<float>::quiet_NaN());
  std::fill_n(p.in.v.begin() + 70 * 16, 16, kInf);
  const Results got = run(impl(), p);
  EXPECT_EQ(got.o, clean.o);
  EXPECT_EQ(got.dq, clean.dq);
}

SAGE_FOR_ALL_IMPLEMENTATIONS(Lists);

}  // namespace
}  // namespace sagebwd::testing
