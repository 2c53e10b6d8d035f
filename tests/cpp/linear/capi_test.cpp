// SPDX-License-Identifier: Apache-2.0
// The linear branch through the C interface: the bits of the C++ calls, defaults, refusals.
#include <gtest/gtest.h>

#include <string>

#include "api/small_problem.h"
#include "linear/linear_problem.h"
#include "sagebwd/sagebwd.h"

namespace sagebwd::testing {
namespace {

sagebwd_block_lists to_c(const BlockLists& lists) {
  sagebwd_block_lists c;
  sagebwd_block_lists_init(&c, sizeof c);
  c.index = lists.index, c.count = lists.count;
  c.width = lists.width, c.rows = lists.rows;
  c.stride_batch = lists.stride_batch, c.stride_head = lists.stride_head;
  c.block_q = lists.block_q, c.block_k = lists.block_k;
  return c;
}

sagebwd_linear_forward_args to_c(const LinearForwardArgs& a, const sagebwd_block_lists* lists) {
  sagebwd_linear_forward_args c;
  EXPECT_EQ(sagebwd_linear_forward_args_init(&c, sizeof c), SAGEBWD_OK);
  c.q = detail::to_c(a.q), c.k = detail::to_c(a.k), c.v = detail::to_c(a.v);
  c.o = detail::to_c(a.o), c.norm = detail::to_c(a.norm);
  c.excluded = lists;
  c.mean_free_keys = a.mean_free_keys;
  return c;
}

sagebwd_linear_backward_args to_c(const LinearBackwardArgs& a, const sagebwd_block_lists* lists) {
  sagebwd_linear_backward_args c;
  EXPECT_EQ(sagebwd_linear_backward_args_init(&c, sizeof c), SAGEBWD_OK);
  c.q = detail::to_c(a.q), c.k = detail::to_c(a.k), c.v = detail::to_c(a.v);
  c.dout = detail::to_c(a.dout), c.dnorm = detail::to_c(a.dnorm);
  c.dq = detail::to_c(a.dq), c.dk = detail::to_c(a.dk), c.dv = detail::to_c(a.dv);
  c.excluded = lists;
  c.mean_free_keys = a.mean_free_keys;
  return c;
}

LinearAnswer through_cpp(LinearProblem& p) {
  LinearForwardArgs f = p.forward_args();
  p.give_workspace(f, workspace_size(f));
  linear_forward(f);
  LinearBackwardArgs b = p.backward_args();
  p.give_workspace(b, workspace_size(b));
  linear_backward(b);
  return p.results();
}

LinearAnswer through_c(LinearProblem& p) {
  const LinearForwardArgs f = p.forward_args();
  const LinearBackwardArgs b = p.backward_args();
  const sagebwd_block_lists lists = to_c(f.excluded);
  size_t bytes = 0;
  sagebwd_linear_forward_args cf = to_c(f, &lists);
  EXPECT_EQ(sagebwd_linear_forward_workspace_size(&cf, &bytes), SAGEBWD_OK);
  EXPECT_EQ(bytes, workspace_size(f));
  p.give_workspace(cf, bytes);
  EXPECT_EQ(sagebwd_linear_forward(&cf), SAGEBWD_OK) << sagebwd_last_error();
  sagebwd_linear_backward_args cb = to_c(b, &lists);
  EXPECT_EQ(sagebwd_linear_backward_workspace_size(&cb, &bytes), SAGEBWD_OK);
  EXPECT_EQ(bytes, workspace_size(b));
  p.give_workspace(cb, bytes);
  EXPECT_EQ(sagebwd_linear_backward(&cb), SAGEBWD_OK) << sagebwd_last_error();
  return p.results();
}

TEST(LinearC, GivesTheBitsOfTheCppCalls) {
  for (bool mean_free : {true, false}) {
    LinearProblem cpp({.mean_free_keys = mean_free}), c(cpp.s);
    const LinearAnswer want = through_cpp(cpp), got = through_c(c);
    EXPECT_EQ(got.o, want.o);
    EXPECT_EQ(got.norm, want.norm);
    EXPECT_EQ(got.dq, want.dq);
    EXPECT_EQ(got.dk, want.dk);
    EXPECT_EQ(got.dv, want.dv);
  }
}

TEST(LinearC, DefaultsAreThoseOfCpp) {
  sagebwd_linear_forward_args f;
  ASSERT_EQ(sagebwd_linear_forward_args_init(&f, sizeof f), SAGEBWD_OK);
  EXPECT_EQ(f.mean_free_keys, 1);
  EXPECT_EQ(f.phi, SAGEBWD_FEATURES_SOFTMAX);
  EXPECT_EQ(f.excluded, nullptr);
  // A struct that ends behind its required fields means the same.
  LinearProblem p({.share = 0.0});
  LinearForwardArgs args = p.forward_args();
  p.give_workspace(args, workspace_size(args));
  linear_forward(args);
  const std::vector<double> want = p.o.values();
  sagebwd_linear_forward_args shorter = to_c(args, nullptr);
  shorter.size = offsetof(sagebwd_linear_forward_args, norm);
  p.give_workspace(shorter, workspace_size(args));
  shorter.mean_free_keys = 1;
  ASSERT_EQ(sagebwd_linear_forward(&shorter), SAGEBWD_OK) << sagebwd_last_error();
  EXPECT_EQ(p.o.values(), want);
}

TEST(LinearC, WithoutListsTheirBlocksMeanNothing) {
  for (int block : {0, -64, -1, 7}) {
    LinearProblem p({.share = 0.0});
    LinearForwardArgs args = p.forward_args();
    args.excluded = {};
    sagebwd_block_lists lists;
    sagebwd_block_lists_init(&lists, sizeof lists);
    lists.block_q = lists.block_k = block;
    sagebwd_linear_forward_args c = to_c(args, &lists);
    size_t bytes = 0;
    ASSERT_EQ(sagebwd_linear_forward_workspace_size(&c, &bytes), SAGEBWD_OK) << block;
    EXPECT_EQ(bytes, workspace_size(args)) << block;
    p.give_workspace(c, bytes);
    ASSERT_EQ(sagebwd_linear_forward(&c), SAGEBWD_OK) << sagebwd_last_error();
    const std::vector<double> got = p.o.values(), want = p.exact().o;
    for (size_t n = 0; n < want.size(); ++n) ASSERT_NEAR(got[n], want[n], 1e-5) << block;
  }
}

TEST(LinearC, RefusesWhatMakesNoSense) {
  LinearProblem p({});
  const LinearForwardArgs args = p.forward_args();
  const sagebwd_block_lists lists = to_c(args.excluded);
  const auto refusal = [&](auto spoil) {
    sagebwd_linear_forward_args c = to_c(args, &lists);
    p.give_workspace(c, workspace_size(args));
    spoil(c);
    EXPECT_EQ(sagebwd_linear_forward(&c), SAGEBWD_INVALID_ARGUMENT);
    return std::string(sagebwd_last_error());
  };
  EXPECT_NE(refusal([](auto& c) { c.mean_free_keys = 2; }).find("mean_free_keys"),
            std::string::npos);
  EXPECT_NE(refusal([](auto& c) { c.phi = 3; }).find("phi"), std::string::npos);
  EXPECT_NE(refusal([](auto& c) { c.version = 9; }).find("version"), std::string::npos);
  EXPECT_NE(refusal([](auto& c) { c.size = 8; }).find("size"), std::string::npos);
  EXPECT_NE(refusal([](auto& c) { c.workspace_bytes = 0; }).find("workspace"), std::string::npos);
  EXPECT_EQ(sagebwd_linear_forward(nullptr), SAGEBWD_INVALID_ARGUMENT);
  EXPECT_EQ(sagebwd_linear_backward(nullptr), SAGEBWD_INVALID_ARGUMENT);
}

}  // namespace
}  // namespace sagebwd::testing
