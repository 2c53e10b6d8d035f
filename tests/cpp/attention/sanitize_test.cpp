// SPDX-License-Identifier: Apache-2.0
// The problems that run under the sanitizers. They are small and reach every code path at least
// once. Memory blocks have exactly the size the library asked for, and there are more threads than
// items.
#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <vector>

#include "support/attention_problem.h"
#include "support/compare.h"
#include "support/implementations.h"
#include "support/pool.h"

namespace sagebwd::testing {
namespace {

struct SanitizeCase {
  const char* text;
  bool dlse = false, partial_kv = false, packed = false;
};

const SanitizeCase kCases[] = {
    {"b2 h4 hk2 nq70 nk130 d8 bf16"},
    {"h2 nq130 nk70 d24 f16 paper causal"},
    {"h2 nq65 nk129 d64 f32 causal align=top_left"},
    {"h1 nq3 nk5 d256 bf16 bshd"},
    {"h2 hk1 nq70 nk130 d24 dv=40 bf16 causal"},
    {"h1 n140 d40 dv=8 f32 paper smooth_q=on lift=O,dV"},
    {"h1 n1 d72 f32"},
    {"h1 n150 d16 f32 window=20,10"},
    {"h1 n150 d16 bf16 rounding=dither"},
    {"h1 n150 d16 f16 paper rounding=dither smooth_q=on tile=64x128"},
    {"h1 n140 d16 f32 lift=S,O,S',dV,dP,dQ,dK"},
    {"h1 n140 d16 f32 lift=S,dV,dK paper smooth_q=on causal"},
    {"h1 nq200 nk70 d16 f32 tile=256x64 smooth_k=off"},
    {"b2 h4 hk2 nq150 nk200 d16 bf16 keep=0.5 blocks=64x64"},
    {.text = "h2 nq70 nk130 d16 f32 causal", .dlse = true},
    {.text = "h2 nq70 nk130 d16 f32 paper", .dlse = true, .partial_kv = true},
    {.text = "h2 hk1 nq100 nk140 d16 bf16 causal", .packed = true},
    {.text = "h2 hk1 nq100 nk140 d16 f32 keep=0.5 blocks=64x64", .packed = true},
    {.text = "h2 hk1 nq100 nk140 d16 f32 rounding=dither",
     .dlse = true,
     .partial_kv = true,
     .packed = true},
};

AttentionProblem problem_of(const SanitizeCase& c) {
  AttentionProblem p = make_problem(c.text);
  p.partial_kv = c.partial_kv;
  if (c.dlse) p.dlse = random_rows(p, 1);
  if (c.packed) p.cu_q = {0, 0, 65, 65, 70, 100}, p.cu_k = {0, 30, 30, 31, 100, 140};
  p.make_lists();
  return p;
}

class Sanitize : public PerImplementation {};

TEST_P(Sanitize, EveryPathOnAPoolOfThreads) {
  for (const SanitizeCase& c : kCases) {
    const AttentionProblem p = problem_of(c);
    Pool pool{4};
    const Results got = run(impl(), p, {.parallel_for = pool.parallel_for(), .guard = 0});
    EXPECT_TRUE(agrees(got, run(reference(), with_levels_of(impl(), p)), {2e-3, 1e-5}, p));
  }
}

TEST_P(Sanitize, OwnThreads) {
  for (const char* text : {"b3 h2 nq70 nk130 d16 bf16 causal", "h2 n300 d16 f32 paper"}) {
    const AttentionProblem p = make_problem(text);
    Pool one{1};
    EXPECT_EQ(first_difference(run(impl(), p, {.guard = 0}),
                               run(impl(), p, {.parallel_for = one.parallel_for(), .guard = 0})),
              "");
  }
}

/// Values that are not finite take paths of their own.
TEST_P(Sanitize, NotFinite) {
  for (const char* text : {"h2 n140 d16 f32 causal", "h2 n140 d16 bf16 paper rounding=dither",
                           "h2 n140 d16 f32 lift=S,O,S',dV,dP,dQ,dK"})
    for (int tensor = 0; tensor < 4; ++tensor) {
      AttentionProblem p = make_problem(text);
      std::vector<float>* inputs[] = {&p.in.q, &p.in.k, &p.in.v, &p.in.dout};
      (*inputs[tensor])[70 * 16 + 3] = std::numeric_limits<float>::quiet_NaN();
      (*inputs[tensor])[100 * 16 + 3] = std::numeric_limits<float>::infinity();
      const Results got = run(impl(), p, {.guard = 0});
      EXPECT_FALSE(std::isfinite(got.dk[70 * 16 + 3])) << text << " tensor " << tensor;
    }
}

SAGE_FOR_ALL_IMPLEMENTATIONS(Sanitize);

}  // namespace
}  // namespace sagebwd::testing
