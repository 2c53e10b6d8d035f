// SPDX-License-Identifier: Apache-2.0
// Which blocks of keys a block of queries meets, and the reverse. This is the one place of the
// backend that knows: loops count steps, ask which block a step is, and assume nothing about the
// order.
#pragma once

#include <algorithm>
#include <cstdint>

#include "cpu/plan.h"

namespace sagebwd::cpu {

/// The blocks of the other side that a block visits. Today a band of the score matrix: neighbouring
/// blocks, in increasing order.
struct Walk {
  int64_t first = 0, steps = 0;

  /// The block of a step, inside its sequence.
  int64_t block(int64_t step) const { return first + step; }
  /// Steps, from the first on, that belong to the leading `tiles` tiles of the recipe.
  int64_t leading(int64_t tiles) const { return std::clamp<int64_t>(tiles - first, 0, steps); }
};

/// Key blocks that hold a key which a query of the block sees.
Walk walk_keys(const Plan& plan, int64_t head, const Block& queries);
/// Query blocks that hold a query which sees a key of the block. `head` is a query head.
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
