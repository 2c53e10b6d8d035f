// SPDX-License-Identifier: Apache-2.0
// Block lists in the oracles: the exact one against all matrices in full, and the walk of the
// recipe oracle.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <limits>

#include "ref/attention_exact.h"
#include "ref/random_head.h"
#include "ref/recipe_tile.h"

namespace sagebwd {
namespace {

using ref::BlockRows;
using ref::ExactResult;
using ref::Visibility;
using testing::RandomHead;

constexpr double kInf = std::numeric_limits<double>::infinity();

std::vector<double> widened(const std::vector<float>& x) { return {x.begin(), x.end()}; }

/// Softmax over a row of logits with -inf where nothing is seen, and its gradient by the Jacobian
/// diag(P) - P·Pᵀ, without D: another way to the same numbers.
struct Full {
  std::vector<double> o, lse, dq, dk, dv;

  template <typename Sees>
  Full(const RandomHead& h, Sees sees)
      : o(h.q.size(), 0.0), dq(h.q.size(), 0.0), dk(h.k.size(), 0.0), dv(h.k.size(), 0.0) {
    const int64_t d = h.d;
    const double scale = static_cast<double>(h.scale);
    const auto q = widened(h.q), k = widened(h.k), v = widened(h.v), dout = widened(h.dout);
    for (int64_t i = 0; i < h.nq; ++i) {
      std::vector<double> p(static_cast<size_t>(h.nk), 0.0), dp(p), ds(p);
      double sum = 0;
      for (int64_t j = 0; j < h.nk; ++j) {
        if (!sees(i, j)) continue;
        double s = 0;
        for (int64_t c = 0; c < d; ++c) {
          s += q[i * d + c] * k[j * d + c];
          dp[j] += dout[i * d + c] * v[j * d + c];
        }
        sum += p[j] = std::exp(scale * s);
      }
      lse.push_back(sum > 0 ? std::log(sum) : -kInf);
      for (double& x : p) x = sum > 0 ? x / sum : 0.0;
      const double dlse = h.dlse.empty() ? 0.0 : static_cast<double>(h.dlse[i]);
      for (int64_t j = 0; j < h.nk; ++j) {
        ds[j] = p[j] * dlse;
        for (int64_t n = 0; n < h.nk; ++n) ds[j] += p[j] * ((j == n) - p[n]) * dp[n];
      }
      for (int64_t j = 0; j < h.nk; ++j)
        for (int64_t c = 0; c < d; ++c) {
          o[i * d + c] += p[j] * v[j * d + c];
          dv[j * d + c] += p[j] * dout[i * d + c];
          dq[i * d + c] += scale * ds[j] * k[j * d + c];
          dk[j * d + c] += scale * ds[j] * q[i * d + c];
        }
    }
  }
};

void expect_equal(const char* name, const std::vector<double>& got,
                  const std::vector<double>& want) {
  ASSERT_EQ(got.size(), want.size()) << name;
  for (size_t n = 0; n < got.size(); ++n)
    ASSERT_TRUE(got[n] == want[n] || std::fabs(got[n] - want[n]) < 1e-12) << name << " " << n;
}

void expect_matches(const RandomHead& h, const BlockRows& lists) {
  const std::vector<double> q = widened(h.q), k = widened(h.k), v = widened(h.v),
                            dout = widened(h.dout), dlse = widened(h.dlse);
  ref::ExactHead head;
  head.nq = h.nq, head.nk = h.nk, head.d = h.d;
  head.q = q.data(), head.k = k.data(), head.v = v.data(), head.dout = dout.data();
  head.dlse = dlse.empty() ? nullptr : dlse.data();
  head.scale = static_cast<double>(h.scale);
  if (h.visible) head.visible = h.visible;
  head.visible.restrict_to(lists);
  const ExactResult got = ref::attention_exact(head);
  const Full want(h, [&](int64_t i, int64_t j) {
    const auto& row = lists.rows[static_cast<size_t>(i / lists.block_q)];
    if (std::find(row.begin(), row.end(), j / lists.block_k) == row.end()) return false;
    if (!h.visible) return true;
    const auto [begin, end] = h.visible(i);
    return begin <= j && j < end;
  });
  expect_equal("o", got.o, want.o);
  expect_equal("lse", got.lse, want.lse);
  expect_equal("dq", got.dq, want.dq);
  expect_equal("dk", got.dk, want.dk);
  expect_equal("dv", got.dv, want.dv);
}

TEST(ExactLists, MatchTheFormulasInFull) {
  // The oracle takes any block sizes; tails on both sides, an empty row, any order.
  expect_matches(RandomHead(37, 53, 16), {16, 8, {{6, 0, 3}, {}, {5}}});
  expect_matches(RandomHead(40, 40, 16).causal(), {8, 8, {{0}, {4, 1}, {0, 2}, {1, 3, 0}, {4}}});
  expect_matches(RandomHead(60, 60, 16).window(7, 3), {32, 16, {{0, 3}, {3, 2, 1}}});
  RandomHead h(30, 44, 16);
  h.dlse = testing::normal_values(30, 1.0, 99);
  expect_matches(h, {8, 16, {{2}, {}, {0, 1}, {2, 0}}});
}

TEST(RefWalk, ListsGiveTheirOrderAndTheLeadingEntries) {
  ref::RecipeHead head;
  head.nq = 200, head.nk = 330;
  head.recipe.tile_q = 64, head.recipe.tile_k = 64;
  head.visible.restrict_to({128, 128, {{2, 0}, {}}});
  EXPECT_EQ(ref::KeyWalk(head, 1).tiles, (std::vector<int64_t>{4, 5, 0, 1}));
  EXPECT_TRUE(ref::KeyWalk(head, 2).tiles.empty());
  head.lead = 1;
  EXPECT_EQ(ref::KeyWalk(head, 0).leading, 2);  // one entry of two tiles
  head.lead = -1;
  EXPECT_EQ(ref::KeyWalk(head, 0).leading, 4);
}

}  // namespace
}  // namespace sagebwd
