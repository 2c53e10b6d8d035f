// SPDX-License-Identifier: Apache-2.0
// A block visits a block of the other side exactly once if the two have a visible pair, else never.
#include "cpu/walk.h"

#include <gtest/gtest.h>

#include <set>
#include <vector>

namespace sagebwd::cpu {
namespace {

const isa::Kernels& any_kernels() {
  int count = 0;
  return *isa::tables(&count)[0];
}

/// A plan that owns its tables.
struct Planned {
  explicit Planned(const spec::Problem& problem) : p(problem), plan(p, any_kernels()) {
    Arena measure(nullptr);
    plan.place_tables(measure);
    memory.resize(measure.used());
    Arena arena(memory.data());
    plan.place_tables(arena);
    plan.fill_tables();
  }
  spec::Problem p;
  Plan plan;
  std::vector<char> memory;
};

spec::Problem problem(int64_t nq, int64_t nk, int64_t left, int64_t right, Align align) {
  spec::Problem p{};
  p.b = 2, p.h = p.hk = 1, p.d = 16, p.nq = nq, p.nk = nk;
  p.left = left, p.right = right, p.align = align;
  p.recipe.tile_q = 64, p.recipe.tile_k = 128;
  return p;
}

bool meet(const Plan& plan, const Block& queries, const Block& keys) {
  for (int i = 0; i < queries.rows; ++i) {
    const spec::KeyRange r = plan.p.visible(queries.seq, queries.first + i);
    if (std::max(r.begin, keys.first) < std::min(r.end, keys.first + keys.rows)) return true;
  }
  return false;
}

std::multiset<int64_t> visited(const Walk& walk) {
  std::multiset<int64_t> blocks;
  for (int64_t step = 0; step < walk.steps; ++step) blocks.insert(walk.block(step));
  return blocks;
}

TEST(CpuWalk, VisitsWhatHasAVisiblePair) {
  for (const auto& [nq, nk] : {std::pair<int64_t, int64_t>{300, 300},
                               {1, 500},
                               {500, 1},
                               {700, 190},
                               {190, 700},
                               {64, 128},
                               {0, 100},
                               {100, 0}})
    for (int64_t left : {-1, 0, 50, 200})
      for (int64_t right : {-1, 0, 70, 150})
        for (Align align : {Align::bottom_right, Align::top_left}) {
          const Planned x(problem(nq, nk, left, right, align));
          SCOPED_TRACE(::testing::Message() << nq << "x" << nk << " window " << left << "," << right
                                            << " align " << static_cast<int>(align));
          for (int64_t q = 0; q < x.plan.q_blocks; ++q) {
            const Block queries = x.plan.query_block(q);
            std::multiset<int64_t> want;
            for (int64_t k = 0; k < x.plan.key_blocks_of(queries.sequence); ++k)
              if (meet(x.plan, queries, x.plan.key_block(x.plan.k_start[queries.sequence] + k)))
                want.insert(k);
            ASSERT_EQ(visited(walk_keys(x.plan, 0, queries)), want) << "query block " << q;
          }
          for (int64_t k = 0; k < x.plan.k_blocks; ++k) {
            const Block keys = x.plan.key_block(k);
            const int64_t first = x.plan.q_start[keys.sequence],
                          end = x.plan.q_start[keys.sequence + 1];
            std::multiset<int64_t> want;
            for (int64_t q = first; q < end; ++q)
              if (meet(x.plan, x.plan.query_block(q), keys)) want.insert(q - first);
            ASSERT_EQ(visited(walk_queries(x.plan, 0, keys)), want) << "key block " << k;
          }
        }
}

TEST(CpuWalk, LeadingStepsAreThoseOfTheLeadingTiles) {
  const Walk walk{.first = 2, .steps = 3};  // tiles 2, 3, 4
  for (int64_t tiles : {0, 1, 2, 3, 4, 5, 9}) {
    int64_t want = 0;
    for (int64_t step = 0; step < walk.steps; ++step) want += walk.block(step) < tiles;
    EXPECT_EQ(walk.leading(tiles), want) << tiles;
  }
}

}  // namespace
}  // namespace sagebwd::cpu
