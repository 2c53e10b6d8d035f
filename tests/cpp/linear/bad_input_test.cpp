// SPDX-License-Identifier: Apache-2.0
// The public calls of the linear branch: what they refuse, before anything is written, and empty
// problems.
#include <gtest/gtest.h>

#include <climits>
#include <functional>

#include "linear/linear_problem.h"
#include "sagebwd/error.h"

namespace sagebwd::testing {
namespace {

std::string refusal(const std::function<void()>& call) {
  try {
    call();
  } catch (const Error& e) {
    return e.kind() == ErrorKind::invalid_argument ? e.what()
                                                   : std::string("another kind: ") + e.what();
  }
  return "";
}

struct Bad {
  const char* message;  // what the error must say
  std::function<void(LinearProblem&, LinearArgs&)> spoil;
};

const std::vector<Bad>& shared_mistakes() {
  static const std::vector<Bad> list{
      {"head dim", [](auto&, LinearArgs& a) { a.q.shape[3] = a.k.shape[3] = 12; }},
      {"heads", [](auto&, LinearArgs& a) { a.k.shape[1] = 3; }},
      {"v: expected shape", [](auto&, LinearArgs& a) { a.v.shape[2] -= 1; }},
      {"k: expected dtype", [](auto&, LinearArgs& a) { a.k.dtype = Dtype::bf16; }},
      {"q: expected a data pointer", [](auto&, LinearArgs& a) { a.q.data = nullptr; }},
      {"q: expected channel stride 1", [](auto&, LinearArgs& a) { a.q.stride[3] = 2; }},
      {"phi", [](auto&, LinearArgs& a) { a.phi = static_cast<FeatureMap>(7); }},
      {"device", [](auto&, LinearArgs& a) { a.device = static_cast<Device>(7); }},
      {"excluded.block_q", [](auto&, LinearArgs& a) { a.excluded.block_q = 100; }},
      {"excluded.block_k", [](auto&, LinearArgs& a) { a.excluded.block_k = 0; }},
      {"excluded.rows", [](auto&, LinearArgs& a) { a.excluded.rows -= 1; }},
      {"excluded.on_device", [](auto&, LinearArgs& a) { a.excluded.on_device = true; }},
      {"excluded.count", [](LinearProblem& p, LinearArgs&) { p.count[1] = 99; }},
      {"excluded.index: expected key blocks from 0 to 5, got 6",
       [](LinearProblem& p, LinearArgs&) { p.index[0] = 6; }},
      {"excluded.index: expected key blocks from 0 to 5, got -1",
       [](LinearProblem& p, LinearArgs&) { p.index[0] = -1; }},
      {"excluded.index: expected each key block once",
       [](LinearProblem& p, LinearArgs&) { p.index[1] = p.index[0]; }},
      {"workspace", [](auto&, LinearArgs& a) { a.workspace = nullptr; }},
      {"workspace", [](auto&, LinearArgs& a) { a.workspace_bytes /= 2; }},
      {"workspace: expected memory of its own",
       [](auto&, LinearArgs& a) { a.workspace = a.k.data; }},
  };
  return list;
}

bool untouched(const LinearProblem& p) {
  for (const auto* x : {&p.o.memory, &p.dq.memory, &p.dk.memory, &p.dv.memory, &p.workspace})
    for (std::byte value : *x)
      if (value != std::byte{0xFF}) return false;
  for (float x : p.norm)
    if (!std::isnan(x)) return false;
  return true;
}

TEST(LinearBadInput, IsRefusedBeforeAnythingIsWritten) {
  for (const Bad& bad : shared_mistakes()) {
    LinearProblem p({});
    LinearForwardArgs f = p.forward_args();
    p.give_workspace(f, workspace_size(f));
    bad.spoil(p, f);
    EXPECT_NE(refusal([&] { linear_forward(f); }).find(bad.message), std::string::npos)
        << bad.message << ": " << refusal([&] { linear_forward(f); });
    EXPECT_TRUE(untouched(p)) << bad.message;
    LinearProblem q({});
    LinearBackwardArgs b = q.backward_args();
    q.give_workspace(b, workspace_size(b));
    bad.spoil(q, b);
    EXPECT_NE(refusal([&] { linear_backward(b); }).find(bad.message), std::string::npos)
        << bad.message << ": " << refusal([&] { linear_backward(b); });
    EXPECT_TRUE(untouched(q)) << bad.message;
  }
}

TEST(LinearBadInput, OutputsNeedMemoryOfTheirOwn) {
  LinearProblem p({});
  LinearForwardArgs f = p.forward_args();
  p.give_workspace(f, workspace_size(f));
  f.o.data = f.q.data;
  EXPECT_THROW(linear_forward(f), Error);
  f = p.forward_args();
  p.give_workspace(f, workspace_size(f));
  f.norm.data = static_cast<float*>(f.o.data);
  EXPECT_THROW(linear_forward(f), Error);
  LinearBackwardArgs b = p.backward_args();
  p.give_workspace(b, workspace_size(b));
  b.dk.data = b.dv.data;
  EXPECT_THROW(linear_backward(b), Error);
  EXPECT_TRUE(untouched(p));
}

/// Mixing is for a GPU; what makes no sense is refused anywhere.
TEST(LinearBadInput, Mixing) {
  LinearProblem p({});
  const std::vector<float> alpha(static_cast<size_t>(p.s.h * 2), 0.5f);
  std::vector<std::byte> memory(1 << 20);
  const auto with = [&](auto args, auto&& change) {
    args.alpha = {alpha.data(), 1, 2, 128};
    args.averages = memory.data(), args.averages_bytes = memory.size();
    change(args);
    return args;
  };
  const auto forward = [&](auto&& change) {
    return refusal([&] {
      linear_forward(with(p.forward_args(), [&](LinearForwardArgs& a) {
        a.sparse = p.dout.at();
        change(a);
      }));
    });
  };
  const auto backward = [&](auto&& change) {
    return refusal([&] {
      linear_backward(with(p.backward_args(), [&](LinearBackwardArgs& a) {
        a.dnorm = {};
        a.dq_sparse = p.q.at(), a.dk_sparse = p.k.at(), a.dv_sparse = p.v.at();
        change(a);
      }));
    });
  };
  const auto says = [](const std::string& got, const char* words) {
    EXPECT_NE(got.find(words), std::string::npos) << words << ": " << got;
  };
  says(forward([](auto&) {}), "does not mix");
  says(backward([](auto&) {}), "does not mix");
  says(forward([](auto& a) { a.alpha = {}; }), "keeps no averages");
  says(forward([](auto& a) { a.alpha.rows = 3; }), "alpha.rows: expected 2");
  says(forward([](auto& a) { a.alpha.block = 1, a.alpha.rows = 200; }), "a multiple of 64, got 1");
  says(forward([](auto& a) { a.sparse.shape[2] -= 1; }), "sparse: expected shape");
  says(forward([](auto& a) { a.averages_bytes = 100; }), "averages: expected at least");
  const float* const means = reinterpret_cast<const float*>(memory.data());
  says(forward([&](auto& a) { a.v_mean = means; }), "expected both or neither");
  says(forward([&](auto& a) { a.k_mean = means, a.v_mean = means + 1; }), "v_mean: expected");
  says(forward([&](auto& a) { a.alpha = {}, a.averages = nullptr, a.k_mean = a.v_mean = means; }),
       "makes the means");
  says(backward([](auto& a) { a.dk_sparse.shape[2] -= 1; }), "dk_sparse: expected shape");
  says(backward([&](auto& a) { a.dnorm = p.backward_args().dnorm; }), "dnorm: expected none");
  says(backward([&](auto& a) { a.dalpha = p.norm.data(); }), "alpha_parts: expected a data");
  says(backward([&](auto& a) { a.alpha = {}, a.dalpha = p.norm.data(); }),
       "dalpha: expected alpha beside it");
  EXPECT_TRUE(untouched(p));
}

TEST(LinearCalls, ServeThroughThePublicInterface) {
  LinearProblem p({});
  LinearForwardArgs f = p.forward_args();
  p.give_workspace(f, workspace_size(f));
  linear_forward(f);
  f.norm = {};  // not asked for
  linear_forward(f);
  LinearBackwardArgs b = p.backward_args();
  p.give_workspace(b, workspace_size(b));
  linear_backward(b);
  const LinearAnswer got = p.results(), want = p.exact();
  for (size_t n = 0; n < want.o.size(); ++n) ASSERT_NEAR(got.o[n], want.o[n], 1e-5);
  for (size_t n = 0; n < want.dk.size(); ++n) ASSERT_NEAR(got.dk[n], want.dk[n], 1e-3);
}

/// Without lists nobody looks at the size of their blocks, whatever it is.
TEST(LinearCalls, WithoutListsTheirBlocksMeanNothing) {
  LinearProblem usual({.nq = 300, .nk = 300, .share = 0.0});
  const auto answer = [](LinearProblem& p, int block_q, int block_k) {
    const auto change = [&](LinearArgs& a) {
      a.excluded = {};
      a.excluded.block_q = block_q, a.excluded.block_k = block_k;
    };
    LinearForwardArgs f = p.forward_args();
    change(f);
    p.give_workspace(f, workspace_size(f));
    linear_forward(f);
    LinearBackwardArgs b = p.backward_args();
    change(b);
    p.give_workspace(b, workspace_size(b));
    linear_backward(b);
    return p.results();
  };
  const LinearAnswer want = answer(usual, 128, 64);
  for (auto [block_q, block_k] :
       {std::array<int, 2>{0, 0}, {64, -64}, {-64, -64}, {-1, -1}, {1, 1}, {INT_MAX, INT_MIN}}) {
    LinearProblem p(usual.s);
    const LinearAnswer got = answer(p, block_q, block_k);
    EXPECT_EQ(got.o, want.o) << block_q << " " << block_k;
    EXPECT_EQ(got.dq, want.dq) << block_q << " " << block_k;
    EXPECT_EQ(got.dk, want.dk) << block_q << " " << block_k;
    EXPECT_EQ(got.dv, want.dv) << block_q << " " << block_k;
  }
}

TEST(LinearCalls, EmptyProblems) {
  for (auto [b, nq, nk] : {std::array<int64_t, 3>{0, 5, 5}, {1, 0, 5}, {1, 5, 0}, {1, 0, 0}}) {
    LinearProblem p({.b = b, .nq = nq, .nk = nk, .share = 0.0});
    LinearForwardArgs f = p.forward_args();
    p.give_workspace(f, workspace_size(f));
    linear_forward(f);
    LinearBackwardArgs g = p.backward_args();
    p.give_workspace(g, workspace_size(g));
    linear_backward(g);
    const LinearAnswer got = p.results();
    for (const auto* x : {&got.o, &got.norm, &got.dq, &got.dk, &got.dv})
      for (double value : *x) EXPECT_EQ(value, 0.0) << b << " " << nq << " " << nk;
  }
}

}  // namespace
}  // namespace sagebwd::testing
