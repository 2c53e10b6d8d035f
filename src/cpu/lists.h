// SPDX-License-Identifier: Apache-2.0
// The block lists of a call, by queries as they came and, for the backward, by keys.
#pragma once

#include <cstdint>

#include "spec/lists.h"

namespace sagebwd::cpu {

class Arena;

/// Does nothing for a problem without lists.
class ListTables {
 public:
  void place(Arena& arena, const spec::Batch& p);
  void fill(const spec::Batch& p);

  /// The key blocks that a block of queries lists, in the order of the list.
  spec::BlockList keys_of(const spec::Batch& p, int64_t sequence, int64_t head,
                          int64_t block) const;
  /// The blocks of queries that list a block of keys, in increasing order; backward only.
  spec::BlockList queries_of(const spec::Batch& p, int64_t sequence, int64_t head,
                             int64_t block) const;

 private:
  void transpose(const spec::Batch& p, const spec::ListSets& sets, int64_t set);

  // First row and first column of each sequence within its set: [sequences + 1] when packed.
  // Otherwise a sequence is a batch entry, and all of them start at 0.
  int64_t *row_start_ = nullptr, *column_start_ = nullptr;
  int64_t columns_ = 0;              // key blocks of a set
  int64_t places_ = 0;               // for the entries of a set
  int64_t* entry_start_ = nullptr;   // [sets][columns + 1]
  int32_t* query_blocks_ = nullptr;  // [sets][places]
};

}  // namespace sagebwd::cpu
