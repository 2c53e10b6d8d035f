// SPDX-License-Identifier: Apache-2.0
// The order in which key blocks of the fused backward start when they add to dQ in turn.
#include "cuda/tile/tickets.cuh"

#include <gtest/gtest.h>

#include <map>
#include <utility>

#include "cuda/sm80/params.h"

namespace sagebwd::cuda::tile {
namespace {

constexpr int kTileQ = 128, kPerBlock = 2, kResident = 2;  // as `paper` at d 64

/// A call with these sequences; packed: as documents.
struct Call {
  Call(int sequences, int hk, int group, int q_blocks, int k_blocks, bool packed)
      : grid(static_cast<unsigned>(sequences * k_blocks * kPerBlock), static_cast<unsigned>(hk)),
        length(static_cast<uint32_t>(k_blocks * kPerBlock)) {
    p.seq.count = sequences, p.hk = hk, p.group = group;
    p.tq = int64_t{sequences} * q_blocks * kBlock;
    p.turns = &somewhere;
    if (packed) p.seq.documents = &document;
  }
  Tickets tickets() const { return {p, grid, kTileQ, kResident}; }

  sm80::BackwardParams p{};
  uint32_t somewhere = 0;
  DocumentStart document{};
  dim3 grid;
  uint32_t length;  // key blocks of a sequence
};

// Otherwise keys would be missing, or a thread block would wait for one that cannot start.
TEST(Tickets, EveryKeyBlockComesOnceAndBehindThoseItWaitsFor) {
  for (bool packed : {false, true})
    for (int sequences : {1, 3, 8})
      for (int hk : {1, 5, 16})
        for (int q_blocks : {0, 1, 7, 300, 10000}) {
          const Call call(sequences, hk, 2, q_blocks, 3, packed);
          const Tickets tickets = call.tickets();
          std::map<std::pair<uint32_t, uint32_t>, uint32_t> next;  // by head and sequence
          for (uint32_t i = 0; i < call.grid.x * call.grid.y; ++i) {
            const auto [block, head] = tickets.keys_of(i);
            ASSERT_LT(block, call.grid.x);
            ASSERT_LT(head, call.grid.y);
            const uint32_t sequence = block / call.length;
            const auto last = std::pair{std::pair{head, sequence}, call.length - 1};
            ASSERT_EQ(block % call.length, next.insert(last).first->second--);
          }
          ASSERT_EQ(next.size(), static_cast<size_t>(hk * sequences));
        }
}

// Key blocks of one head and sequence that start together wait for each other.
TEST(Tickets, ShortSequencesStartSideBySide) {
  for (bool packed : {false, true}) {
    const Call call(4, 16, 1, 8, 8, packed);
    const Tickets tickets = call.tickets();
    EXPECT_EQ(tickets.width, packed ? 16u : 64u);
    std::map<std::pair<uint32_t, uint32_t>, int> started;
    for (uint32_t i = 0; i < 2 * tickets.width; ++i) {
      const auto [block, head] = tickets.keys_of(i);
      ++started[{head, block / call.length}];
    }
    EXPECT_EQ(started.size(), tickets.width);
    for (const auto& [lineup, count] : started) EXPECT_EQ(count, 2);
  }
}

// More of them would only push each other out of the cache.
TEST(Tickets, LongSequencesAreFewAtATime) {
  EXPECT_EQ(Call(4, 16, 1, 256, 256, false).tickets().width, 3u);
  EXPECT_EQ(Call(4, 16, 4, 256, 256, false).tickets().width, 1u);
  Call any_order(4, 16, 1, 8, 8, false);
  any_order.p.turns = nullptr;
  EXPECT_EQ(any_order.tickets().width, 1u);
}

}  // namespace
}  // namespace sagebwd::cuda::tile
