// SPDX-License-Identifier: Apache-2.0
// Which keys the queries of one head of a checked problem see.
#pragma once

#include "ref/visibility.h"
#include "spec/lists.h"
#include "spec/problem.h"

namespace sagebwd::ref {

/// Keeps a copy of what it needs; documents on the host must stay where they are.
inline Visibility visibility_of(const spec::Problem& p, int64_t sequence, int64_t head) {
  const spec::Sequence s = p.sequence(sequence);
  Visibility visible([p, s](int64_t i) {
    const spec::KeyRange r = p.visible(s, i);
    return std::pair<int64_t, int64_t>(r.begin, r.end);
  });
  if (!p.has_lists()) return visible;
  const spec::ListSets sets(p);
  const int64_t set = sets.of(s.batch, head), first = spec::first_list_row(p, sequence);
  BlockRows lists{p.blocks.block_q, p.blocks.block_k, {}};
  for (int64_t row = 0; row < ceil_div(s.nq, p.blocks.block_q); ++row) {
    const spec::BlockList list = sets.row(set, first + row);
    lists.rows.emplace_back(list.index, list.index + list.count);
  }
  visible.restrict_to(std::move(lists));
  return visible;
}

}  // namespace sagebwd::ref
