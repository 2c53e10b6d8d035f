// SPDX-License-Identifier: Apache-2.0
// No call reads memory that it has not written, and none writes memory that is not an output.
// Outputs and workspaces start as NaN, as 0x7F and as 0x80 bytes; the results must be those of a
// clean run, bit for bit. `run` itself checks the 512-element guards and the gaps between strides,
// and that inputs, O and LSE stay as they were.
#include <gtest/gtest.h>

#include <cstring>
#include <vector>

#include "sagebwd/attention.h"
#include "support/attention_problem.h"
#include "support/implementations.h"

namespace sagebwd::testing {
namespace {

/// Every code path that takes its own buffers.
const char* const kCases[] = {
    "h4 hk2 nq130 nk200 d64 bf16",
    "h2 nq130 nk200 d40 f32 causal paper",
    "h2 nq200 nk70 d72 f16 paper smooth_q=on rounding=dither",
    "h2 n150 d64 f32 causal lift=S,O,S',dV,dP,dQ,dK",
    "h2 n150 d64 f32 lift=O window=40,3 smooth_k=off",
};

AttentionProblem problem_of(const char* text, bool packed) {
  AttentionProblem p = make_problem(text);
  p.dlse = random_rows(p, 3);
  if (packed) {
    const int32_t nq = static_cast<int32_t>(p.c.nq), nk = static_cast<int32_t>(p.c.nk);
    p.cu_q = {0, 0, 17, nq - 20, nq - 20, nq};
    p.cu_k = {0, 9, 9, nk - 30, nk - 10, nk};
  }
  return p;
}

class Memory : public PerImplementation {};

TEST_P(Memory, ResultsDoNotDependOnWhatMemoryHeld) {
  for (const char* text : kCases)
    for (bool packed : {false, true}) {
      AttentionProblem p = problem_of(text, packed);
      for (bool partial_kv : {false, true}) {
        p.partial_kv = partial_kv;
        const Results clean = run(impl(), p, {.fill = 0x00});
        for (int fill : {0xFF, 0x7F, 0x80}) {
          const Results got = run(impl(), p, {.fill = static_cast<unsigned char>(fill)});
          EXPECT_EQ(first_difference(clean, got), "") << "fill " << fill << " " << p.describe();
        }
      }
    }
}

/// A gap of some elements after every token, head and batch, which `run` checks to stay untouched.
Placement gappy(const std::string&, const Shape& s) {
  Placement p;
  p.stride[3] = 1;
  p.stride[2] = s[3] + 5;
  p.stride[1] = s[2] * p.stride[2] + 11;
  p.stride[0] = s[1] * p.stride[1] + 3;
  p.offset = 7;
  return p;
}

TEST_P(Memory, StrideGapsStayUntouched) {
  for (const char* text : kCases) {
    const AttentionProblem p = problem_of(text, false);
    EXPECT_EQ(first_difference(run(impl(), p), run(impl(), p, {.fill = 0x80, .place = gappy})), "")
        << p.describe();
  }
}

SAGE_FOR_ALL_IMPLEMENTATIONS(Memory);

/// The harness notices what it is meant to notice.
TEST(MemoryHarness, SeesStrayWrites) {
  const Tensor t(Dtype::bf16, {1, 2, 3, 8}, gappy("", {1, 2, 3, 8}));
  EXPECT_EQ(t.stray_write(), "");
  auto* data = static_cast<uint16_t*>(t.view().data);
  data[0] = 1;
  EXPECT_EQ(t.stray_write(), "");
  for (int64_t at : {int64_t{-1}, int64_t{8}, int64_t{-Tensor::kGuard}}) {
    const uint16_t before = data[at];
    data[at] = 1;
    EXPECT_NE(t.stray_write(), "") << at;
    data[at] = before;
  }
}

/// The public call takes a workspace of any alignment.
TEST(WorkspaceAlignment, AnyByteWillDo) {
  AttentionProblem p = make_problem("h2 nq70 nk90 d64 f32 causal");
  const Results want = run(fastest(), p);
  std::vector<float> o(p.in.q.size()), lse(140), dq(o.size()), dk(p.in.k.size()), dv(dk);
  ForwardArgs f;
  f.q = p.c.q_view(p.in.q.data()), f.k = p.c.k_view(p.in.k.data());
  f.v = p.c.k_view(p.in.v.data()), f.o = p.c.q_view(o.data());
  f.lse = contiguous_stats(lse.data(), 2, 70);
  f.mask = p.c.mask;
  BackwardArgs b;
  static_cast<AttentionArgs&>(b) = f;
  b.dout = p.c.q_view(p.in.dout.data()), b.dq = p.c.q_view(dq.data());
  b.dk = p.c.k_view(dk.data()), b.dv = p.c.k_view(dv.data());
  const size_t bytes = std::max(workspace_size(f), workspace_size(b));
  std::vector<std::byte> memory(bytes + 64, std::byte{0xFF});
  for (size_t offset : {0, 1, 7, 63}) {
    f.workspace = b.workspace = memory.data() + offset;
    f.workspace_bytes = workspace_size(f), b.workspace_bytes = workspace_size(b);
    forward(f);
    backward(b);
    EXPECT_EQ(o, want.o) << offset;
    EXPECT_EQ(dq, want.dq) << offset;
    EXPECT_EQ(dk, want.dk) << offset;
    EXPECT_EQ(dv, want.dv) << offset;
  }
}

}  // namespace
}  // namespace sagebwd::testing
