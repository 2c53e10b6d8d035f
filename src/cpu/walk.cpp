// SPDX-License-Identifier: Apache-2.0
#include "cpu/walk.h"

namespace sagebwd::cpu {
namespace {

int clip(int64_t x, int tile) { return static_cast<int>(std::clamp<int64_t>(x, 0, tile)); }

/// The keys that a block's queries see together: both ends of what a query sees grow with it.
spec::KeyRange seen_by(const Plan& plan, const Block& queries) {
  return {plan.p.visible(queries.seq, queries.first).begin,
          plan.p.visible(queries.seq, queries.first + queries.rows - 1).end};
}

/// The first of the numbers from begin on that `reached` accepts, or end; it accepts all later
/// ones.
template <typename F>
int64_t first_of(int64_t begin, int64_t end, F reached) {
  while (begin < end) {
    const int64_t middle = begin + (end - begin) / 2;
    if (reached(middle))
      end = middle;
    else
      begin = middle + 1;
  }
  return end;
}

}  // namespace

Walk walk_keys(const Plan& plan, int64_t head, const Block& queries) {
  Walk walk;
  const spec::KeyRange seen = seen_by(plan, queries);
  if (seen.begin >= seen.end) return walk;
  walk.first = seen.begin / plan.bk, walk.end = ceil_div(seen.end, plan.bk);
  if (!plan.p.has_lists()) return walk;
  const BlockLists& lists = plan.p.blocks;
  walk.list = plan.lists.keys_of(plan.p, queries.sequence, head, queries.first / lists.block_q);
  walk.per_entry = lists.block_k / plan.bk;
  return walk;
}

Walk walk_queries(const Plan& plan, int64_t head, const Block& keys) {
  Walk walk;
  const int64_t start = plan.q_start[keys.sequence];
  const int64_t blocks = plan.q_start[keys.sequence + 1] - start;
  const auto seen = [&](int64_t block) { return seen_by(plan, plan.query_block(start + block)); };
  walk.first = first_of(0, blocks, [&](int64_t block) { return seen(block).end > keys.first; });
  walk.end = first_of(walk.first, blocks,
                      [&](int64_t block) { return seen(block).begin >= keys.first + keys.rows; });
  if (!plan.p.has_lists()) return walk;
  const BlockLists& lists = plan.p.blocks;
  walk.list = plan.lists.queries_of(plan.p, keys.sequence, head, keys.first / lists.block_k);
  walk.per_entry = lists.block_q / plan.bq;
  return walk;
}

int keys_in_use(const Plan& plan, const Block& queries, const Block& keys) {
  const spec::KeyRange last = plan.p.visible(queries.seq, queries.first + queries.rows - 1);
  return static_cast<int>(round_up(clip(last.end - keys.first, plan.bk), isa::kContract));
}

bool visible_in_tile(const Plan& plan, const Block& queries, const Block& keys, int32_t* begin,
                     int32_t* end) {
  const spec::KeyRange first = plan.p.visible(queries.seq, queries.first);
  const spec::KeyRange last = plan.p.visible(queries.seq, queries.first + queries.rows - 1);
  const bool whole =
      queries.rows == plan.bq && last.begin <= keys.first && first.end >= keys.first + plan.bk;
  if (whole) return false;
  for (int i = 0; i < plan.bq; ++i) {
    begin[i] = end[i] = 0;
    if (i >= queries.rows) continue;
    const spec::KeyRange r = plan.p.visible(queries.seq, queries.first + i);
    begin[i] = clip(r.begin - keys.first, plan.bk);
    end[i] = clip(r.end - keys.first, plan.bk);
  }
  return true;
}

}  // namespace sagebwd::cpu
