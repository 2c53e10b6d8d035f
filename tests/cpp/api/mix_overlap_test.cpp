// SPDX-License-Identifier: Apache-2.0
// Mixing, means of blocks and the largest scores: results need memory of their own, and blocks a
// size that makes sense.
#include <gtest/gtest.h>

#include <functional>
#include <string>
#include <vector>

#include "sagebwd/error.h"
#include "sagebwd/mix.h"

namespace sagebwd::testing {
namespace {

constexpr int64_t kTokens = 64, kChannels = 8;

/// Memory that the tests cut up: 64 places for a tensor each.
struct Memory {
  std::vector<float> numbers = std::vector<float>(64 * kTokens * kChannels, 0.5f);
  float* at(int place) { return numbers.data() + place * kTokens * kChannels; }
  TensorView tensor(int place) {
    return contiguous(at(place), Dtype::f32, {1, 1, kTokens, kChannels});
  }
};

template <typename Args>
std::string refusal(void (*call)(const Args&), const Args& args) {
  try {
    call(args);
  } catch (const Error& e) {
    return e.what();
  }
  return "";
}

/// Each change must be refused by name; the call as it is must be served.
template <typename Args>
void refuses(void (*call)(const Args&), const Args& good,
             const std::vector<std::pair<const char*, std::function<void(Args&)>>>& changes) {
  EXPECT_EQ(refusal(call, good), "");
  for (const auto& [words, change] : changes) {
    Args bad = good;
    change(bad);
    EXPECT_NE(refusal(call, bad).find(words), std::string::npos)
        << words << ": " << refusal(call, bad);
  }
}

template <typename Args>
void give_both(Args& a, Memory& m) {
  a.sparse = m.tensor(0);
  a.alpha = {m.at(2), 1, 1, 64};
  a.norm = {m.at(3), {kTokens, kTokens, 1}};
}

TEST(MixOverlap, Forward) {
  Memory m;
  MixForwardArgs a;
  give_both(a, m);
  a.linear = m.tensor(1), a.out = m.tensor(4);
  refuses<MixForwardArgs>(mix_forward, a,
                          {{"out: expected memory of its own", [&](auto& b) { b.out = b.sparse; }},
                           {"linear uses", [&](auto& b) { b.out = b.linear; }},
                           {"alpha uses", [&](auto& b) { b.alpha.data = m.at(4) + 7; }},
                           {"norm uses", [&](auto& b) { b.norm.data = m.at(4) + 500; }},
                           {"alpha.block", [&](auto& b) { b.alpha.block = 0; }},
                           {"alpha.block", [&](auto& b) { b.alpha.block = -64; }},
                           {"alpha.block", [&](auto& b) { b.alpha.block = INT64_MAX - 63; }}});
}

TEST(MixOverlap, Backward) {
  Memory m;
  MixBackwardArgs a;
  give_both(a, m);
  a.linear = m.tensor(1), a.dout = m.tensor(4), a.dsparse = m.tensor(5), a.dlinear = m.tensor(6);
  a.alpha.batches = 1, a.dalpha = m.at(7);
  // Two batch entries share their alpha, so that parts of its gradient go through the workspace.
  for (TensorView* t : {&a.sparse, &a.linear, &a.dout, &a.dsparse, &a.dlinear})
    t->shape[0] = 2, t->stride[0] = 16 * kTokens * kChannels;
  ASSERT_GT(workspace_size(a), 0u);
  a.workspace = m.at(8), a.workspace_bytes = workspace_size(a);
  refuses<MixBackwardArgs>(mix_backward, a,
                           {{"dalpha: expected memory", [&](auto& b) { b.dalpha = m.at(2); }},
                            {"dsparse uses", [&](auto& b) { b.dlinear = b.dsparse; }},
                            {"workspace: expected", [&](auto& b) { b.workspace = m.at(4); }},
                            {"dsparse: expected", [&](auto& b) { b.norm.data = m.at(5); }}});
}

TEST(MixOverlap, SparsePart) {
  Memory m;
  MixSparseArgs a;
  give_both(a, m);
  a.dout = m.tensor(4), a.dsparse = m.tensor(5), a.parts = m.at(6);
  refuses<MixSparseArgs>(mix_sparse_backward, a,
                         {{"dsparse: expected", [&](auto& b) { b.dsparse = b.dout; }},
                          {"parts: expected", [&](auto& b) { b.parts = m.at(5); }},
                          {"parts: expected", [&](auto& b) { b.parts = m.at(2); }}});
}

TEST(MixOverlap, BlockMeans) {
  Memory m;
  BlockMeansArgs a;
  a.q = m.tensor(0), a.k = m.tensor(1), a.q_means = m.at(2), a.k_means = m.at(3);
  a.workspace = m.at(4), a.workspace_bytes = workspace_size(a);
  refuses<BlockMeansArgs>(block_means, a,
                          {{"q_means: expected", [&](auto& b) { b.q_means = m.at(0); }},
                           {"k_means: expected", [&](auto& b) { b.k_means = m.at(0) + 9; }},
                           {"k_means: expected", [&](auto& b) { b.k_means = b.q_means; }},
                           {"workspace: expected", [&](auto& b) { b.workspace = m.at(1); }},
                           {"block_q", [&](auto& b) { b.block_q = 0; }},
                           {"block_k", [&](auto& b) { b.block_k = -64; }},
                           {"block_k", [&](auto& b) { b.block_k = INT64_MAX - 63; }}});
}

TEST(MixOverlap, TopK) {
  Memory m;
  std::vector<int32_t> index(4 * 3), count(4);
  TopKArgs a;
  a.scores = m.at(0), a.rows = 4, a.columns = 5, a.k = 3;
  a.index = index.data(), a.count = count.data();
  refuses<TopKArgs>(
      top_k, a,
      {{"index: expected memory", [&](auto& b) { b.index = reinterpret_cast<int32_t*>(m.at(0)); }},
       {"count: expected memory",
        [&](auto& b) { b.count = reinterpret_cast<int32_t*>(m.at(0)) + 19; }},
       {"count: expected memory", [&](auto& b) { b.count = b.index + 11; }}});
}

}  // namespace
}  // namespace sagebwd::testing
