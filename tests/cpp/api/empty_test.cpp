// SPDX-License-Identifier: Apache-2.0
// Problems with a dimension of size zero succeed, and write what the mathematics says: nothing, or
// the attention over no keys, which is O = 0, LSE = -inf and zero gradients.
#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <string>

#include "api/small_problem.h"

namespace sagebwd {
namespace {

using testing::CBackward;
using testing::CForward;
using testing::Sizes;
using testing::SmallProblem;

constexpr float kInf = std::numeric_limits<float>::infinity();

struct EmptyCase {
  const char* name;
  Sizes sizes;
};

void PrintTo(const EmptyCase& c, std::ostream* out) { *out << c.name; }

class Empty : public ::testing::TestWithParam<EmptyCase> {};

TEST_P(Empty, ForwardSucceeds) {
  for (const Dtype dtype : {Dtype::f32, Dtype::bf16}) {
    const Sizes& s = GetParam().sizes;
    SmallProblem problem(s, dtype);
    const ForwardArgs args = problem.forward_args();
    ASSERT_NO_THROW(forward(args));
    for (float x : problem.values(args.o)) EXPECT_EQ(x, 0.0f);
    for (int64_t i = 0; i < s.b * s.h * s.nq; ++i) EXPECT_EQ(problem.lse()[i], -kInf);
    for (int64_t i = 0; i < s.b * s.h; ++i) EXPECT_EQ(problem.max_logit()[i], -kInf);
    CForward c(args);
    EXPECT_EQ(sagebwd_forward(&c.args), SAGEBWD_OK) << sagebwd_last_error();
  }
}

TEST_P(Empty, BackwardSucceedsWithZeroGradients) {
  for (const Dtype dtype : {Dtype::f32, Dtype::bf16}) {
    SmallProblem problem(GetParam().sizes, dtype);
    forward(problem.forward_args());
    const BackwardArgs args = problem.backward_args();
    ASSERT_NO_THROW(backward(args));
    for (const TensorView* t : {&args.dq, &args.dk, &args.dv})
      for (float x : problem.values(*t)) EXPECT_EQ(x, 0.0f);
    CBackward c(args);
    EXPECT_EQ(sagebwd_backward(&c.args), SAGEBWD_OK) << sagebwd_last_error();
  }
}

INSTANTIATE_TEST_SUITE_P(Api, Empty,
                         ::testing::Values(EmptyCase{"no_batch", {.b = 0}},
                                           EmptyCase{"no_heads", {.h = 0, .hk = 0}},
                                           EmptyCase{"no_query_heads", {.h = 0, .hk = 2}},
                                           EmptyCase{"no_queries", {.nq = 0}},
                                           EmptyCase{"no_keys", {.nk = 0}},
                                           EmptyCase{"no_tokens", {.nq = 0, .nk = 0}}),
                         [](const auto& c) { return std::string(c.param.name); });

/// Null pointers are fine where there is nothing to point at.
TEST(EmptyProblem, NeedsNoMemory) {
  ForwardArgs f;
  f.q = f.o = contiguous(nullptr, Dtype::f32, {2, 4, 0, 16});
  f.k = f.v = contiguous(nullptr, Dtype::f32, {2, 2, 0, 16});
  std::vector<std::byte> workspace(workspace_size(f) + 1);
  f.workspace = workspace.data(), f.workspace_bytes = workspace.size();
  EXPECT_NO_THROW(forward(f));
}

/// Nothing to compute needs no memory and no time, however large the batch.
TEST(EmptyProblem, HugeBatchesOfNothingAreFree) {
  struct Shape {
    int64_t b, h, hk, nq, nk;
  };
  constexpr int64_t kHuge = int64_t{1} << 40;
  for (const Shape& s : {Shape{kHuge, 1, 1, 0, 0}, Shape{1, kHuge, kHuge, 0, 0},
                         Shape{0, 4, 2, kHuge, 5}, Shape{kHuge, 0, 0, 5, 5}}) {
    const std::string name = std::to_string(s.b) + " " + std::to_string(s.h);
    ForwardArgs f;
    f.q = f.o = contiguous(nullptr, Dtype::f32, {s.b, s.h, s.nq, 8});
    f.k = f.v = contiguous(nullptr, Dtype::f32, {s.b, s.hk, s.nk, 8});
    f.lse = contiguous_stats(nullptr, s.h, s.nq);
    EXPECT_EQ(workspace_size(f), 0u) << name;
    EXPECT_NO_THROW(forward(f)) << name;
    CForward cf(f);
    EXPECT_EQ(sagebwd_forward(&cf.args), SAGEBWD_OK) << sagebwd_last_error();
    BackwardArgs b;
    static_cast<AttentionArgs&>(b) = f;
    b.dout = b.dq = f.q, b.dk = b.dv = f.k;
    EXPECT_EQ(workspace_size(b), 0u) << name;
    EXPECT_NO_THROW(backward(b)) << name;
    CBackward cb(b);
    EXPECT_EQ(sagebwd_backward(&cb.args), SAGEBWD_OK) << sagebwd_last_error();
  }
}

/// workspace_size answers at once for a batch that is too large to run, and the number is right.
TEST(EmptyProblem, HugeBatchesAreMeasuredAtOnce) {
  ForwardArgs f;
  const auto ask = [&](int64_t b) {
    f.q = f.o = contiguous(nullptr, Dtype::f32, {b, 1, 1, 8});
    f.k = f.v = contiguous(nullptr, Dtype::f32, {b, 1, 1, 8});
    return workspace_size(f);
  };
  constexpr int64_t kHuge = int64_t{1} << 40;
  EXPECT_GT(ask(kHuge), size_t{kHuge} * 8);
  EXPECT_LT(ask(kHuge), ask(2 * kHuge));
}

/// Documents without queries, without keys, or without both, between full ones.
TEST(EmptyProblem, DocumentsMayBeEmpty) {
  const Sizes s{.b = 1, .h = 2, .hk = 1, .nq = 5, .nk = 7, .d = 16};
  const int32_t cu_q[] = {0, 0, 2, 2, 4, 5};
  const int32_t cu_k[] = {0, 3, 3, 3, 7, 7};  // documents 1 and 4 have queries and no keys
  SmallProblem problem(s);
  std::vector<float> max_logit(5 * 2, 0.0f);
  ForwardArgs f = problem.forward_args();
  f.documents = {cu_q, cu_k, 5};
  f.max_logit = max_logit.data();
  std::vector<std::byte> workspace(workspace_size(f));
  f.workspace = workspace.data(), f.workspace_bytes = workspace.size();
  ASSERT_NO_THROW(forward(f));
  const std::vector<float> o = problem.values(f.o);
  for (int64_t h = 0; h < 2; ++h)
    for (int64_t i = 0; i < 5; ++i) {
      const bool seen = i == 2 || i == 3;
      EXPECT_EQ(std::isfinite(problem.lse()[h * 5 + i]), seen) << "head " << h << " query " << i;
      for (int64_t c = 0; c < 16; ++c) {
        const float x = o[static_cast<size_t>((h * 5 + i) * 16 + c)];
        EXPECT_TRUE(seen || x == 0.0f) << x;
      }
    }
  for (int64_t t = 0; t < 5; ++t)
    for (int64_t h = 0; h < 2; ++h)
      EXPECT_EQ(std::isfinite(max_logit[static_cast<size_t>(t * 2 + h)]), t == 3);

  BackwardArgs b = problem.backward_args();
  b.documents = f.documents;
  std::vector<std::byte> workspace_b(workspace_size(b));
  b.workspace = workspace_b.data(), b.workspace_bytes = workspace_b.size();
  ASSERT_NO_THROW(backward(b));
  const std::vector<float> dq = problem.values(b.dq), dk = problem.values(b.dk),
                           dv = problem.values(b.dv);
  for (int64_t h = 0; h < 2; ++h)
    for (int64_t i : {0, 1, 4})
      for (int64_t c = 0; c < 16; ++c)
        EXPECT_EQ(dq[static_cast<size_t>((h * 5 + i) * 16 + c)], 0.0f);
  for (size_t i = 0; i < 3 * 16; ++i) {  // the keys of document 0, which nobody queries
    EXPECT_EQ(dk[i], 0.0f);
    EXPECT_EQ(dv[i], 0.0f);
  }
  for (const auto& grad : {dq, dk, dv})
    for (float x : grad) EXPECT_TRUE(std::isfinite(x));
}

}  // namespace
}  // namespace sagebwd
