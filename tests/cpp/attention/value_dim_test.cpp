// SPDX-License-Identifier: Apache-2.0
// V of another head dim than q and k: the same numbers as V padded with zeros, less memory, and
// saved codes that replace q, k and v. parity_test.cpp has the recipes and masks.
#include <gtest/gtest.h>

#include <memory>
#include <string>
#include <vector>

#include "sagebwd/attention.h"
#include "sagebwd/codes.h"
#include "support/attention_problem.h"
#include "support/compare.h"
#include "support/implementations.h"

namespace sagebwd::testing {
namespace {

/// Rows of `from` channels with zeros behind, or without their last channels.
std::vector<float> resized(const std::vector<float>& x, int64_t from, int64_t to) {
  std::vector<float> out;
  for (size_t row = 0; row < x.size(); row += static_cast<size_t>(from))
    for (int64_t c = 0; c < to; ++c) out.push_back(c < from ? x[row + c] : 0.0f);
  return out;
}

class ValueDim : public PerImplementation {};

TEST_P(ValueDim, GivesWhatPaddingGives) {
  for (const char* text :
       {"h4 hk2 nq130 nk200 d96 dv=64 f32 causal", "h2 nq130 nk200 d192 dv=128 bf16",
        "b2 h2 n150 d72 dv=8 f16 bshd", "h2 n150 d64 dv=40 f32 paper lift=O,dV",
        "h2 n150 d64 dv=24 f32 rounding=dither"}) {
    AttentionProblem p = make_problem(text);
    SCOPED_TRACE(p.describe());
    p.dlse = random_rows(p, 3);
    AttentionProblem padded = p;
    const int64_t d = p.c.d, dv = p.c.value_dim();
    padded.c.dv = 0;
    padded.in.v = resized(p.in.v, dv, d), padded.in.dout = resized(p.in.dout, dv, d);
    const Results got = run(impl(), p), want = run(impl(), padded);
    const Budget same{.rel_l2 = p.c.dtype == Dtype::f32 ? 1e-5 : 1e-3};
    const auto wide = [](const std::vector<float>& x) {
      return std::vector<double>(x.begin(), x.end());
    };
    EXPECT_TRUE(close("O", got.o, wide(resized(want.o, d, dv)), p.o_shape(), same, p));
    EXPECT_TRUE(close("dQ", got.dq, wide(want.dq), p.q_shape(), same, p));
    EXPECT_TRUE(close("dK", got.dk, wide(want.dk), p.k_shape(), same, p));
    EXPECT_TRUE(close("dV", got.dv, wide(resized(want.dv, d, dv)), p.v_shape(), same, p));
    EXPECT_EQ(got.lse, want.lse);
  }
}

/// All results of one call pair. With codes, the backward gets no q, k and v.
std::vector<float> run_saved(const dispatch::Implementation& impl, const AttentionProblem& p,
                             bool with_codes) {
  const spec::AttnCase& c = p.c;
  std::vector<float> o(c.o_elements()), lse(c.b * c.h * c.nq), dq(c.q_elements()),
      dk(c.k_elements()), dv(c.v_elements());
  trace::Inputs in = p.in;
  ForwardArgs f;
  f.q = c.q_view(in.q.data()), f.k = c.k_view(in.k.data()), f.v = c.v_view(in.v.data());
  f.o = c.o_view(o.data()), f.lse = contiguous_stats(lse.data(), c.h, c.nq);
  f.mask = c.mask, f.recipe = c.recipe, f.documents = p.documents();
  // Bytes behind the codes must stay as they are.
  constexpr std::byte kPattern{0x5A};
  std::vector<std::byte> codes(codes_size(f) + 64, kPattern);
  if (with_codes) f.codes = codes.data(), f.codes_bytes = codes.size() - 64;
  const auto call = [&](const auto& args, auto run) {
    const spec::Problem problem = spec::resolve(args, true);
    std::vector<std::byte> memory(impl.workspace(problem) + dispatch::kWorkspaceAlign, kPattern);
    void* start = memory.data();
    size_t space = memory.size();
    std::align(dispatch::kWorkspaceAlign, impl.workspace(problem), start, space);
    run(problem, args, start);
  };
  call(f, impl.forward);
  for (size_t i = codes.size() - 64; i < codes.size(); ++i) EXPECT_EQ(codes[i], kPattern);
  BackwardArgs b;
  static_cast<AttentionArgs&>(b) = f;
  if (with_codes) b.q.data = b.k.data = b.v.data = nullptr;
  b.dout = c.o_view(in.dout.data()), b.dq = c.q_view(dq.data());
  b.dk = c.k_view(dk.data()), b.dv = c.v_view(dv.data());
  call(b, impl.backward);
  std::vector<float> all;
  for (const auto* x : {&o, &lse, &dq, &dk, &dv}) all.insert(all.end(), x->begin(), x->end());
  return all;
}

TEST_P(ValueDim, SavedCodesGiveTheSameBits) {
  for (const char* text : {"b2 h4 hk2 n140 d192 dv=128 f32 causal", "h2 nq70 nk300 d24 dv=40 f32",
                           "h4 hk2 nq400 nk500 d40 dv=8 f32 smooth_k=off"}) {
    AttentionProblem p = make_problem(text);
    if (p.c.b == 1) {  // documents, some of them empty
      const int32_t nq = static_cast<int32_t>(p.c.nq), nk = static_cast<int32_t>(p.c.nk);
      p.cu_q = {0, 0, 30, nq}, p.cu_k = {0, 20, 20, nk};
    }
    SCOPED_TRACE(p.describe());
    EXPECT_EQ(run_saved(impl(), p, true), run_saved(impl(), p, false));
  }
}

SAGE_FOR_ALL_IMPLEMENTATIONS(ValueDim);

ForwardArgs forward_of(const spec::AttnCase& c) {
  ForwardArgs f;
  f.q = c.q_view(nullptr), f.k = c.k_view(nullptr);
  f.v = c.v_view(nullptr), f.o = c.o_view(nullptr);
  f.recipe = c.recipe;
  return f;
}

TEST(ValueDimMemory, CodesCountTheBytesOfV) {
  const auto bytes = [](const char* text) {
    return static_cast<int64_t>(codes_size(forward_of(spec::AttnCase::parse(text))));
  };
  // 64 channels of two key heads, of 2 * 512 tokens and of a centre for every 128 of them.
  const int64_t fewer = 2 * 2 * (512 + 4) * 64;
  EXPECT_EQ(bytes("b2 h4 hk2 n512 d192") - bytes("b2 h4 hk2 n512 d192 dv=128"), fewer);
  EXPECT_EQ(bytes("b2 h4 hk2 n512 d192 dv=256") - bytes("b2 h4 hk2 n512 d192"), fewer);
}

TEST(ValueDimMemory, LayoutOfOneHeadDimIsThatOfBefore) {
  const CodesShape shape{
      .h = 4, .hk = 2, .d = 72, .queries = 300, .keys = 500, .sequences = 3, .packed = true};
  CodesShape named = shape;
  named.dv = 72;
  for (const CodesShape& s : {shape, named}) {
    const CodesLayout at(s);
    EXPECT_EQ(at.k8, 4 * 300 * 72);
    EXPECT_EQ(at.v8, at.k8 + 2 * 500 * 72);
    EXPECT_EQ(at.q_scale, at.v8 + 2 * 500 * 72);
    EXPECT_EQ(at.v_scale, at.q_scale + 4 * 300 * 4);
    EXPECT_EQ(at.k_scale, at.v_scale + 2 * 500 * 4);
    EXPECT_EQ(at.centre8, at.k_scale + 2 * 500 * 4);
    EXPECT_EQ(at.centre_scale, at.centre8 + 2 * 6 * 72);
    EXPECT_EQ(at.v_centre8, at.centre_scale + 2 * 6 * 4);
    EXPECT_EQ(at.v_centre_scale, at.v_centre8 + 2 * 6 * 72);
    EXPECT_EQ(at.bytes, at.v_centre_scale + 2 * 6 * 4);
  }
}

TEST(ValueDimMemory, WorkspaceDoesNotGrowByPaddingOfV) {
  for (const dispatch::Implementation* impl : available_production())
    for (const char* rest : {"bf16", "f32 causal", "bf16 paper", "f32 lift=O,dV"}) {
      const auto bytes = [&](const std::string& dims, bool backward) {
        const spec::AttnCase c = spec::AttnCase::parse("h8 n4096 " + dims + " " + rest);
        const ForwardArgs f = forward_of(c);
        if (!backward) return impl->workspace(spec::resolve(f, false));
        BackwardArgs b;
        static_cast<AttentionArgs&>(b) = f;
        b.dq = f.q, b.dk = f.k, b.dv = f.v, b.dout = f.o;
        return impl->workspace(spec::resolve(b, false));
      };
      for (bool backward : {false, true}) {
        const size_t narrow = bytes("d192 dv=128", backward), padded = bytes("d192", backward);
        // A byte at least for each of the 64 channels that V does not have.
        EXPECT_LE(narrow + size_t{8} * 4096 * 64, padded) << impl->name << " " << rest;
      }
    }
}

}  // namespace
}  // namespace sagebwd::testing
