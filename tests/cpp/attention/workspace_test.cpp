// SPDX-License-Identifier: Apache-2.0
// Memory of long sequences: linear in the number of tokens, and small enough to train on.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <fstream>
#include <string>

#include "sagebwd/attention.h"
#include "support/attention_problem.h"
#include "support/compare.h"
#include "support/implementations.h"

namespace sagebwd::testing {
namespace {

struct Bytes {
  size_t forward, backward, tensors;
  size_t total() const { return forward + backward + tensors; }
};

Bytes bytes_of(const std::string& text) {
  const spec::AttnCase c = spec::AttnCase::parse(text);
  ForwardArgs f;
  f.q = f.o = c.q_view(nullptr), f.k = f.v = c.k_view(nullptr);
  f.mask = c.mask, f.recipe = c.recipe;
  BackwardArgs b;
  static_cast<AttentionArgs&>(b) = f;
  b.dout = b.dq = f.q, b.dk = b.dv = f.k;
  const int64_t elements = 4 * c.q_elements() + 4 * c.k_elements();
  return {workspace_size(f), workspace_size(b),
          static_cast<size_t>(elements * dtype_size(c.dtype) + 4 * c.b * c.h * c.nq)};
}

TEST(WorkspaceSize, SixtyFourThousandTokensFitIntoAGigabyte) {
  for (const char* text : {"n65536 d64 bf16", "n65536 d64 bf16 causal", "n65536 d64 f32 paper",
                           "n65536 d64 bf16 paper smooth_q=on"}) {
    const Bytes bytes = bytes_of(text);
    std::printf("%s: forward %.1f MiB, backward %.1f MiB, tensors %.1f MiB\n", text,
                static_cast<double>(bytes.forward) / 0x1p20,
                static_cast<double>(bytes.backward) / 0x1p20,
                static_cast<double>(bytes.tensors) / 0x1p20);
    EXPECT_LT(bytes.total(), size_t{1} << 30) << text;
  }
}

TEST(WorkspaceSize, GrowsLinearly) {
  for (const char* rest :
       {" d64 bf16", " d128 f32 paper", " d64 paper smooth_q=on lift=S,O,S',dV,dQ,dK"}) {
    const auto at = [&](int64_t n) { return bytes_of("n" + std::to_string(n) + rest); };
    const Bytes a = at(65536), b = at(131072), c = at(262144);
    // Equal steps in the number of tokens cost equal steps in memory, twice as many twice as much;
    // `vectorwise` has a number more per query for each octave of keys, one of which is new.
    const auto nearly_equal = [&](size_t x, size_t y) {
      EXPECT_NEAR(static_cast<double>(x), static_cast<double>(y), 3e-3 * static_cast<double>(y))
          << rest;
    };
    nearly_equal(2 * (b.forward - a.forward), c.forward - b.forward);
    nearly_equal(2 * (b.backward - a.backward), c.backward - b.backward);
    EXPECT_LE(b.forward, 2.003 * static_cast<double>(a.forward)) << rest;
    EXPECT_LE(b.backward, 2.003 * static_cast<double>(a.backward)) << rest;
  }
}

/// Largest resident memory of this process so far, in bytes.
size_t peak_memory() {
  std::ifstream status("/proc/self/status");
  for (std::string line; std::getline(status, line);)
    if (line.rfind("VmHWM:", 0) == 0) return std::stoull(line.substr(6)) * 1024;
  return 0;
}

/// The real thing: minutes of work, so it runs on request. Forward and backward at 65,536 tokens,
/// the process below 1 GiB, and sampled rows of O and dQ against FP64.
TEST(LongSequence, RunsBelowAGigabyte) {
  if (std::getenv("SAGEBWD_LONG_TESTS") == nullptr) GTEST_SKIP() << "set SAGEBWD_LONG_TESTS=1";
  const AttentionProblem p = make_problem("n65536 d64 bf16");
  const Results got = run(fastest(), p);
  const size_t peak = peak_memory();
  std::printf("peak resident memory %.1f MiB\n", static_cast<double>(peak) / 0x1p20);
  EXPECT_LT(peak, size_t{1} << 30);
  AttentionProblem rows = p;  // a few queries see everything their dQ depends on
  rows.c.nq = 16;
  const auto sampled = [&](const std::vector<float>& x) {
    std::vector<float> out;
    for (int64_t i = 0; i < 16; ++i)
      out.insert(out.end(), x.begin() + i * 4001 * 64, x.begin() + (i * 4001 + 1) * 64);
    return out;
  };
  rows.in.q = sampled(p.in.q), rows.in.dout = sampled(p.in.dout);
  const Exact want = exact(rows);
  EXPECT_TRUE(close("O", sampled(got.o), want.o, rows.q_shape(), {.rel_l2 = 0.05}, rows));
  EXPECT_TRUE(close("dQ", sampled(got.dq), want.dq, rows.q_shape(), {.rel_l2 = 0.05}, rows));
}

}  // namespace
}  // namespace sagebwd::testing
