// SPDX-License-Identifier: Apache-2.0
// Block lists as the implementations see them (BlockLists in sagebwd/attention.h). They have been
// checked.
#pragma once

#include <algorithm>
#include <cstdint>

#include "base/math.h"
#include "spec/batch.h"

namespace sagebwd::spec {

/// The key blocks of one row, in the order of the list, or the query blocks of a column.
struct BlockList {
  const int32_t* index = nullptr;
  int64_t count = 0;
};

/// A set is the rows that belong together: those of one head of one batch entry, or of all that
/// share them.
struct ListSets {
  explicit ListSets(const Batch& p)
      : lists(p.blocks),
        batches(lists.stride_batch == 0 ? std::min<int64_t>(p.b, 1) : p.b),
        heads(lists.stride_head == 0 ? std::min<int64_t>(p.h, 1) : p.h) {}

  int64_t count() const { return batches * heads; }
  int64_t of(int64_t batch, int64_t head) const {
    return (batches > 1 ? batch : 0) * heads + (heads > 1 ? head : 0);
  }
  int64_t first_row(int64_t set) const {
    return set / heads * lists.stride_batch + set % heads * lists.stride_head;
  }
  BlockList row(int64_t set, int64_t row) const {
    const int64_t n = first_row(set) + row;
    const int64_t first = lists.offset != nullptr ? lists.offset[n] : n * lists.width;
    const int64_t count = lists.offset != nullptr  ? lists.offset[n + 1] - first
                          : lists.count != nullptr ? lists.count[n]
                                                   : lists.width;
    // Lists without any entry may come without memory.
    return {lists.index == nullptr ? nullptr : lists.index + first, count};
  }
  /// Places for the entries of a set: at least as many as it has.
  int64_t entries(int64_t set) const {
    if (lists.offset == nullptr) return lists.rows * lists.width;
    return lists.offset[first_row(set) + lists.rows] - lists.offset[first_row(set)];
  }

  const BlockLists& lists;
  int64_t batches, heads;
};

/// The first row of a sequence within its set.
inline int64_t first_list_row(const Batch& p, int64_t sequence) {
  int64_t row = 0;
  for (int64_t t = 0; p.packed() && t < sequence; ++t)
    row += ceil_div(p.sequence(t).nq, p.blocks.block_q);
  return row;
}

/// Tiles that blocks are multiples of; 0: any.
struct ListTiles {
  int q = 0, k = 0;
};

/// Throws Error(invalid_argument) with what was expected and what came. Entries are looked at with
/// check_memory only. `name` is what the caller knows the lists by.
void check_lists(const Batch& p, bool check_memory, const char* name, ListTiles tiles = {});

/// Without lists nobody has looked at their other fields, so they become the usual ones.
inline void forget_unused_lists(Batch& p) {
  if (!p.has_lists()) p.blocks = {};
}

}  // namespace sagebwd::spec
