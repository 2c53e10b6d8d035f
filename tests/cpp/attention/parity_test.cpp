// SPDX-License-Identifier: Apache-2.0
// Every implementation computes what the recipe oracle computes, with every feature. They are
// compared twice: as a whole, and with a backward that starts from the oracle's O and LSE, so that
// a difference in the forward cannot hide one in the backward.
#include <gtest/gtest.h>

#include <cmath>
#include <vector>

#include "support/attention_problem.h"
#include "support/compare.h"
#include "support/implementations.h"

namespace sagebwd::testing {
namespace {

using trace::InputKind;

struct ParityCase {
  const char* text;
  InputKind kind = InputKind::gaussian;
  float scale = 0.0f;
  bool dlse = false, partial_kv = false, packed = false;
};

const std::vector<ParityCase> kCases = {
    // Recipes, element types, tails of both tiles, grouped heads.
    {"h4 hk2 nq200 nk333 d64 bf16"},
    {"b2 h2 nq257 nk129 d64 bf16 paper"},
    {"h2 nq130 nk200 d128 f16"},
    {"h2 nq130 nk200 d128 f16 paper"},
    {"h3 hk1 nq100 nk260 d80 f32"},
    {"h3 hk1 nq100 nk260 d80 f32 paper"},
    {"h2 n300 d8 f32"},
    {"h1 n200 d256 bf16 bshd"},
    {"h2 n150 d256 f16 paper bshd"},
    {"h2 n1 d64 f32"},
    {"h2 nq1 nk300 d64 bf16"},
    {"h2 nq300 nk1 d64 f32"},
    // Tiles.
    {"h2 nq300 nk500 d64 tile=64x64"},
    {"h2 nq300 nk500 d64 tile=256x64 paper"},
    {"h2 nq300 nk500 d64 tile=64x256 paper"},
    {"h1 nq300 nk500 d64 tile=192x128"},
    // Tiles that cut blocks of 128 keys with one centre, and many octaves of them.
    {"h2 nq200 nk500 d64 tile=64x192 causal paper"},
    {"h2 nq200 nk333 d64 tile=64x64 paper smooth_q=on f32"},
    {"h1 nq200 nk700 d64 tile=64x64 rounding=dither seed3"},
    {"h1 nq200 nk500 d64 tile=64x64 f32"},
    {"h2 nq200 nk1100 d64 tile=128x128 causal"},
    // Masks.
    {"h2 n300 d64 causal"},
    {"h2 n300 d64 causal paper f32"},
    {"h2 nq190 nk333 d64 causal"},
    {"h2 nq333 nk190 d64 causal"},
    {"h2 nq333 nk190 d64 causal align=top_left"},
    {"h2 nq190 nk333 d64 causal align=top_left paper"},
    {"h2 n400 d64 window=70,-1"},
    {"h2 n400 d64 window=-1,33"},
    {"h2 n400 d64 window=30,50 align=top_left"},
    {"h2 n400 d64 causal window=100,-1 paper"},
    {"h2 nq64 nk400 d64 window=0,0"},
    // Switches.
    {"h2 n300 d64 paper smooth_q=on"},
    {"h2 n300 d64 smooth_q=on paper causal"},
    {"h2 n300 d64 smooth_k=off"},
    {"h2 n300 d64 rotate=off"},
    {"h2 n300 d64 paper rotate=on causal"},
    {"h2 n300 d72 paper rotate=on smooth_q=on f32"},
    {"h2 n300 d96 paper smooth_q=on f32"},
    {"h2 n300 d64 smooth_k=off rounding=dither seed5 f32"},
    {.text = "h4 hk2 nq200 nk700 d40 f32", .kind = InputKind::offset, .dlse = true},
    {.text = "h4 hk2 nq400 nk500 d72 causal", .dlse = true, .packed = true},
    {"h2 n300 d64 softcap=5 causal"},
    {"h2 n300 d64 lift=S,S' f32 softcap=5"},
    {"h2 n300 d64 lift=O,dV f32"},
    {"h2 n300 d64"},
    {"h2 n300 d64 lift=O"},
    {"h2 n500 d64 causal window=200,-1"},
    {"h2 n300 d64 rounding=dither seed7"},
    {"h2 n300 d64 rounding=dither:dQ seed7 causal"},
    {"h2 n300 d64 rounding=dither:O,dK seed7"},
    {"h2 n300 d64 rounding=dither paper seed8 causal"},
    {"h2 n300 d64 rounding=dither paper smooth_q=on seed9 f32"},
    {.text = "h2 n300 d64", .scale = 0.3f},
    {.text = "h2 n300 d64 causal paper", .scale = -0.2f},
    // Lifted matmuls.
    {"h2 n300 d64 lift=S f32"},
    {"h2 n300 d64 lift=O f32"},
    {"h2 n300 d64 lift=S' f32"},
    {"h2 n300 d64 lift=S,S' paper smooth_q=on f32"},
    {"h2 n300 d64 lift=dV f32 causal"},
    {"h2 n300 d64 lift=dQ f32 causal"},
    {"h2 n300 d64 lift=dK f32 causal paper smooth_q=on"},
    {"h2 n300 d64 lift=S,O,S',dV,dP,dQ,dK f32 paper"},
    // Gradients of LSE, parts of the keys, documents.
    {.text = "h2 n300 d64 causal f32", .kind = InputKind::offset, .dlse = true},
    {.text = "h4 hk2 nq200 nk300 d64 f32 paper", .kind = InputKind::offset, .dlse = true},
    {.text = "h2 nq200 nk300 d64 f32", .kind = InputKind::offset, .partial_kv = true},
    {.text = "h2 nq200 nk300 d64", .dlse = true, .partial_kv = true},
    {.text = "h4 hk2 nq400 nk500 d64", .packed = true},
    {.text = "h4 hk1 nq400 nk500 d64 causal f32 rounding=dither", .dlse = true, .packed = true},
    {.text = "h2 nq400 nk500 d40 causal paper align=top_left", .packed = true},
    {.text = "h2 nq400 nk500 d64 f16 window=20,5", .partial_kv = true, .packed = true},
    {.text = "h2 nq400 nk500 d64 tile=64x64 causal", .packed = true},
    {.text = "h2 nq400 nk500 d64 tile=64x192 paper f32", .packed = true},
    // Block lists.
    {"h4 hk2 nq300 nk500 d64 keep=0.3"},
    {"h2 nq300 nk500 d64 keep=0.3 lists=skewed lead=0 causal"},
    {"h2 nq333 nk700 d64 keep=0.4 blocks=64x128 lead=all f32"},
    {"b2 h2 nq333 nk700 d40 keep=0.5 blocks=192x192 lists=mass f16"},
    {"h2 n600 d64 keep=0.2 blocks=128x64 paper lists=diagonal window=100,30"},
    {"h3 hk1 nq300 nk400 d80 keep=0.3 rounding=dither paper smooth_q=on lead=2 f32"},
    {"h2 n300 d64 keep=0.4 lift=S,O,S',dV,dP,dQ,dK f32 lists=mass"},
    {.text = "h2 nq200 nk600 d64 f32 keep=0.3", .kind = InputKind::offset, .dlse = true},
    {.text = "h2 nq200 nk600 d64 keep=0.3 causal", .dlse = true, .partial_kv = true},
    {.text = "h4 hk2 nq400 nk500 d64 keep=0.6 causal", .packed = true},
    {.text = "h4 hk1 nq400 nk500 d64 keep=0.4 blocks=64x64 lists=skewed f32",
     .dlse = true,
     .packed = true},
    // V of another head dim than q and k: smaller, larger, beyond what vectors are padded to.
    {"h2 nq130 nk200 d192 dv=128 causal"},
    {"h4 hk2 nq130 nk200 d64 dv=128 f32"},
    {"h2 nq130 nk200 d72 dv=8 f16 paper"},
    {"h2 nq130 nk200 d8 dv=136 f32 paper bshd"},
    {"b2 h2 nq100 nk300 d64 dv=48 bshd window=30,50"},
    {"h2 n300 d40 dv=72 rounding=dither f32"},
    {"h2 n200 d96 dv=64 smooth_k=off rotate=off tile=192x64"},
    {"h2 n200 d64 dv=96 lift=S,O,S',dV,dP,dQ,dK paper smooth_q=on f32"},
    {"h2 n200 d96 dv=40 lift=O,dV paper f32"},
    {"h2 nq300 nk500 d64 dv=24 keep=0.3 lead=2"},
    {"h2 n200 d48 dv=80 causal", InputKind::outlier},
    {.text = "h2 nq200 nk300 d24 dv=56 f32", .kind = InputKind::offset, .dlse = true},
    {.text = "h2 nq200 nk300 d56 dv=24", .dlse = true, .partial_kv = true},
    {.text = "h4 hk2 nq400 nk500 d96 dv=64 causal", .dlse = true, .packed = true},
    {.text = "h4 hk1 nq400 nk500 d64 dv=96 keep=0.4 blocks=64x64 f32", .packed = true},
    // Inputs that are hard to quantise.
    {"h2 n300 d64 causal", InputKind::outlier},
    {"h2 n300 d64 paper", InputKind::outlier},
    {"h2 n512 d64", InputKind::sink},
    {"h2 n512 d64", InputKind::long_rows},
    {"h2 n300 d64 smooth_k=off", InputKind::offset},
};

AttentionProblem problem_of(const ParityCase& c) {
  AttentionProblem p = make_problem(c.text, c.kind);
  p.scale = c.scale;
  p.partial_kv = c.partial_kv;
  if (c.dlse) p.dlse = random_rows(p, 5);
  if (c.packed) {  // among them documents without queries, without keys, without both
    p.cu_q = {0, 0, 130, 131, 131, 250, 300, 400};
    p.cu_k = {0, 60, 60, 200, 200, 203, 371, 500};
    p.make_lists();
  }
  return p;
}

class Parity : public PerImplementation {};

TEST_P(Parity, OutputsMatchTheRecipeOracle) {
  for (const ParityCase& c : kCases) {
    const AttentionProblem p = with_levels_of(impl(), problem_of(c));
    if (!impl().decline(p.resolved()).empty()) continue;  // 255 levels of P are not for all
    const Results want = run(reference(), p);
    const Results alone = run(impl(), p, {.o = &want.o, .lse = &want.lse});
    EXPECT_TRUE(agrees(alone, want, {1e-3, 1e-6}, p));
    // The whole chain: the backward reads the implementation's own forward. Few codes of P that
    // round the other way move D: dK of a sink by .0011.
    const Results chain = run(impl(), p);
    EXPECT_TRUE(agrees(chain, want, {1.5e-3, 1e-6}, p)) << "(backward of its own forward)";
  }
}

SAGE_FOR_PRODUCTION_IMPLEMENTATIONS(Parity);

}  // namespace
}  // namespace sagebwd::testing
