// SPDX-License-Identifier: Apache-2.0
// Which blocks of keys a block of queries meets, and the reverse. This is the one place of the
// backend that knows: loops take the blocks that a walk gives them, and assume nothing about their
// order.
#pragma once

#include <algorithm>
#include <cstdint>
#include <optional>

#include "cpu/plan.h"

namespace sagebwd::cpu {

/// The blocks of the other side that a block visits: the band of the score matrix that its mask
/// leaves visible, or the part of a list that lies in it.
struct Walk {
  int64_t first = 0, end = 0;           // the band: neighbouring blocks, in increasing order
  std::optional<spec::BlockList> list;  // none: every block of the band
  int64_t per_entry = 1;                // blocks that an entry of the list stands for

  /// visit(block, place) for each block, numbered inside its sequence. `place`: the block of a
  /// band, the entry of a list.
  template <typename F>
  void for_each(F visit) const {
    if (!list) {
      for (int64_t block = first; block < end; ++block) visit(block, block);
      return;
    }
    for (int64_t entry = 0; entry < list->count; ++entry) {
      const int64_t begin = list->index[entry] * per_entry;
      for (int64_t block = std::max(begin, first); block < std::min(begin + per_entry, end);
           ++block)
        visit(block, entry);
    }
  }
};

/// Key blocks that hold a key which a query of the block sees. `head` is a query head.
Walk walk_keys(const Plan& plan, int64_t head, const Block& queries);
/// Query blocks that hold a query which sees a key of the block, in increasing order.
Walk walk_queries(const Plan& plan, int64_t head, const Block& keys);

/// Keys of a tile that a product has to run over: up to the last one any query sees, in whole INT8
/// contractions. The keys behind are masked; on the diagonal of a causal mask that is half a tile.
int keys_in_use(const Plan& plan, const Block& queries, const Block& keys);

/// Visible keys of each query of a block, relative to the first key of a tile and clipped to it;
/// none for padding queries. Returns false when every real query sees the whole tile and there are
/// no padding queries.
bool visible_in_tile(const Plan& plan, const Block& queries, const Block& keys, int32_t* begin,
                     int32_t* end);

}  // namespace sagebwd::cpu
