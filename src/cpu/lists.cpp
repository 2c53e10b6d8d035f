// SPDX-License-Identifier: Apache-2.0
#include "cpu/lists.h"

#include <algorithm>

#include "cpu/plan.h"

namespace sagebwd::cpu {
namespace {

bool transposes(const spec::Batch& p) { return p.direction == spec::Direction::backward; }

/// Sequences of which each has rows of its own in a set.
int64_t sequences_of_set(const spec::Batch& p) { return p.packed() ? p.documents.count : 1; }

}  // namespace

void ListTables::place(Arena& arena, const spec::Batch& p) {
  if (!p.has_lists()) return;
  row_start_ = arena.take<int64_t>(sequences_of_set(p) + 1);
  column_start_ = arena.take<int64_t>(sequences_of_set(p) + 1);
  if (!transposes(p)) return;
  columns_ = places_ = 0;
  for (int64_t t = 0; t < sequences_of_set(p); ++t)
    columns_ += ceil_div(p.packed() ? p.sequence(t).nk : p.nk, p.blocks.block_k);
  const spec::ListSets sets(p);
  for (int64_t set = 0; set < sets.count(); ++set) places_ = std::max(places_, sets.entries(set));
  entry_start_ = arena.take<int64_t>(sets.count() * (columns_ + 1));
  query_blocks_ = arena.take<int32_t>(sets.count() * places_);
}

void ListTables::fill(const spec::Batch& p) {
  if (!p.has_lists()) return;
  row_start_[0] = column_start_[0] = 0;
  for (int64_t t = 0; t < sequences_of_set(p); ++t) {
    const int64_t nq = p.packed() ? p.sequence(t).nq : p.nq;
    const int64_t nk = p.packed() ? p.sequence(t).nk : p.nk;
    row_start_[t + 1] = row_start_[t] + ceil_div(nq, p.blocks.block_q);
    column_start_[t + 1] = column_start_[t] + ceil_div(nk, p.blocks.block_k);
  }
  if (!transposes(p)) return;
  const spec::ListSets sets(p);
  for (int64_t set = 0; set < sets.count(); ++set) transpose(p, sets, set);
}

/// A counting sort: rows come in increasing order, so the entries of a column do as well.
void ListTables::transpose(const spec::Batch& p, const spec::ListSets& sets, int64_t set) {
  int64_t* start = entry_start_ + set * (columns_ + 1);
  int32_t* out = query_blocks_ + set * places_;
  const auto for_each = [&](auto visit) {
    for (int64_t t = 0; t < sequences_of_set(p); ++t)
      for (int64_t row = row_start_[t]; row < row_start_[t + 1]; ++row) {
        const spec::BlockList list = sets.row(set, row);
        for (int64_t e = 0; e < list.count; ++e)
          visit(column_start_[t] + list.index[e], static_cast<int32_t>(row - row_start_[t]));
      }
  };
  std::fill_n(start, columns_ + 1, 0);
  for_each([&](int64_t column, int32_t) { ++start[column + 1]; });
  for (int64_t column = 0; column < columns_; ++column) start[column + 1] += start[column];
  // Each start moves to the end of its column, which is the start of the next one.
  for_each([&](int64_t column, int32_t row) { out[start[column]++] = row; });
  for (int64_t column = columns_; column > 0; --column) start[column] = start[column - 1];
  start[0] = 0;
}

spec::BlockList ListTables::keys_of(const spec::Batch& p, int64_t sequence, int64_t head,
                                    int64_t block) const {
  const spec::ListSets sets(p);
  if (!p.packed()) return sets.row(sets.of(sequence, head), block);
  return sets.row(sets.of(0, head), row_start_[sequence] + block);
}

spec::BlockList ListTables::queries_of(const spec::Batch& p, int64_t sequence, int64_t head,
                                       int64_t block) const {
  const spec::ListSets sets(p);
  const int64_t set = sets.of(p.packed() ? 0 : sequence, head);
  const int64_t column = (p.packed() ? column_start_[sequence] : 0) + block;
  const int64_t* start = entry_start_ + set * (columns_ + 1) + column;
  return {query_blocks_ + set * places_ + start[0], start[1] - start[0]};
}

}  // namespace sagebwd::cpu
