// SPDX-License-Identifier: Apache-2.0
// A block visits a block of the other side exactly once if the two have a visible pair, else never.
#include "cpu/walk.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <set>
#include <utility>
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
  walk.for_each([&](int64_t block, int64_t) { blocks.insert(block); });
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

/// Block lists that own their memory: row r of a head has the key blocks of rows[r].
struct OwnedLists {
  OwnedLists(const std::vector<std::vector<int32_t>>& rows, int block_q, int block_k) {
    offset.push_back(0);
    for (const std::vector<int32_t>& row : rows) {
      index.insert(index.end(), row.begin(), row.end());
      offset.push_back(static_cast<int64_t>(index.size()));
    }
    view.index = index.data(), view.offset = offset.data();
    view.rows = static_cast<int64_t>(rows.size());
    view.block_q = block_q, view.block_k = block_k;
  }
  std::vector<int32_t> index;
  std::vector<int64_t> offset;
  BlockLists view;
};

std::vector<std::pair<int64_t, int64_t>> steps(const Walk& walk) {
  std::vector<std::pair<int64_t, int64_t>> all;
  walk.for_each([&](int64_t block, int64_t place) { all.push_back({block, place}); });
  return all;
}

TEST(CpuWalk, PlacesOfABandAreItsBlocks) {
  Walk walk;
  walk.first = 2, walk.end = 4;
  EXPECT_EQ(steps(walk), (std::vector<std::pair<int64_t, int64_t>>{{2, 2}, {3, 3}}));
}

TEST(CpuWalk, ListsKeepTheirOrderAndTheMaskActsInside) {
  // Blocks of 128 x 256 in tiles of 64 x 128: a row has two tiles of queries, an entry two of keys.
  const OwnedLists lists({{3, 0}, {}, {1, 2, 0}}, 128, 256);
  spec::Problem p = problem(300, 1000, -1, -1, Align::bottom_right);
  p.blocks = lists.view;
  const Planned open(p);
  using Steps = std::vector<std::pair<int64_t, int64_t>>;
  const Walk first = walk_keys(open.plan, 0, open.plan.query_block(1));
  EXPECT_EQ(steps(first), (Steps{{6, 0}, {7, 0}, {0, 1}, {1, 1}}));
  EXPECT_EQ(steps(walk_keys(open.plan, 0, open.plan.query_block(2))), Steps{});
  p.right = 0, p.align = Align::top_left;  // causal: queries 256 … 299 see keys up to 299
  const Planned causal(p);
  EXPECT_EQ(steps(walk_keys(causal.plan, 0, causal.plan.query_block(4))),
            (Steps{{2, 0}, {0, 2}, {1, 2}}));
}

/// Every listed pair once and no other, whatever the lists: with counts from none to all, a column
/// that all list, shared lists or one set per head and batch entry, documents.
TEST(CpuWalk, ByKeysIsTheTransposeOfByQueries) {
  const int32_t cu_q[] = {0, 130, 130, 300, 301}, cu_k[] = {0, 200, 500, 500, 900};
  for (bool packed : {false, true})
    for (bool own : {false, true}) {
      spec::Problem p = problem(packed ? 301 : 700, 900, -1, packed ? -1 : 0, Align::bottom_right);
      p.direction = spec::Direction::backward;
      p.h = 3, p.b = packed ? 1 : 2;
      if (packed) p.documents = {cu_q, cu_k, 4};
      p.recipe.tile_k = 64;
      p.blocks.block_q = 128, p.blocks.block_k = 64;
      const int64_t sets = own ? p.h * p.b : 1;
      std::vector<std::vector<int32_t>> rows;
      uint64_t random = 7;
      for (int64_t set = 0; set < sets; ++set)
        for (int64_t t = 0; t < (packed ? 4 : 1); ++t) {
          const spec::Sequence s = p.sequence(t);
          for (int64_t row = 0; row < ceil_div(s.nq, 128); ++row) {
            std::vector<int32_t> list;
            for (int32_t block = 0; block < ceil_div(s.nk, 64); ++block) {
              random = random * 6364136223846793005u + 1442695040888963407u;
              if (block == 2 || (random >> 60) < static_cast<uint64_t>(4 + row * 5))
                list.push_back(block);
            }
            std::reverse(list.begin(), list.end());
            rows.push_back(list);
          }
        }
      OwnedLists lists(rows, 128, 64);
      lists.view.rows /= sets;
      if (own)
        lists.view.stride_head = lists.view.rows, lists.view.stride_batch = 3 * lists.view.rows;
      p.blocks = lists.view;
      const Planned x(p);
      SCOPED_TRACE(::testing::Message() << "packed " << packed << " own lists " << own);
      int64_t pairs = 0;
      for (int64_t h = 0; h < p.h; ++h) {
        std::multiset<std::pair<int64_t, int64_t>> by_query, by_key;
        for (int64_t q = 0; q < x.plan.q_blocks; ++q) {
          const Block queries = x.plan.query_block(q);
          for (int64_t k : visited(walk_keys(x.plan, h, queries)))
            by_query.insert({q, x.plan.k_start[queries.sequence] + k});
        }
        for (int64_t k = 0; k < x.plan.k_blocks; ++k) {
          const Block keys = x.plan.key_block(k);
          int64_t last = -1;
          walk_queries(x.plan, h, keys).for_each([&](int64_t q, int64_t) {
            EXPECT_GT(q, last);  // in increasing order
            last = q;
            by_key.insert({x.plan.q_start[keys.sequence] + q, k});
          });
        }
        EXPECT_EQ(by_key, by_query) << "head " << h;
        pairs += static_cast<int64_t>(by_query.size());
      }
      EXPECT_GT(pairs, 20);
    }
}

}  // namespace
}  // namespace sagebwd::cpu
