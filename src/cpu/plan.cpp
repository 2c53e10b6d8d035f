// SPDX-License-Identifier: Apache-2.0
#include "cpu/plan.h"

#include <algorithm>
#include <thread>

namespace sagebwd::cpu {
namespace {

/// Work items the backward aims at, whatever the number of threads: results must not depend on it.
constexpr int64_t kBackwardItems = 32;
constexpr int64_t kMaxChunks = 8;

}  // namespace

backend::Tiles tiles_of(const spec::Problem& p, const isa::Kernels& kernels) {
  return backend::any_tiles(p.recipe, kernels.p_levels);
}

Plan::Plan(const spec::Problem& problem, const isa::Kernels& kernels) : p(problem) {
  const backend::Tiles tiles = tiles_of(problem, kernels);
  bq = tiles.q, bk = tiles.k, p_levels = static_cast<float>(tiles.p_levels);
  dl = static_cast<int>(round_up(p.d, isa::kLanes));
  dk = static_cast<int>(round_up(p.d, isa::kContract));
  num_sequences = p.num_sequences();
  q_blocks = k_blocks = 0;
  int64_t most_key_blocks = 0;
  for (int64_t t = 0; t < num_sequences; ++t) {
    const spec::Sequence s = p.sequence(t);
    q_blocks += ceil_div(s.nq, bq);
    k_blocks += ceil_div(s.nk, bk);
    most_key_blocks = std::max(most_key_blocks, ceil_div(s.nk, bk));
  }
  const int64_t heads = std::max<int64_t>(1, num_sequences * p.hk);
  chunks = static_cast<int>(std::clamp<int64_t>(
      ceil_div(kBackwardItems, heads), 1, std::clamp<int64_t>(most_key_blocks, 1, kMaxChunks)));
  // The caller's pool may have any number of threads; more than the machine has would not help.
  slots = std::max(default_threads(), static_cast<int>(std::thread::hardware_concurrency()));
}

void Plan::place_tables(Arena& arena) {
  q_start = arena.take<int64_t>(num_sequences + 1);
  k_start = arena.take<int64_t>(num_sequences + 1);
}

void Plan::fill_tables() {
  q_start[0] = k_start[0] = 0;
  for (int64_t t = 0; t < num_sequences; ++t) {
    const spec::Sequence s = p.sequence(t);
    q_start[t + 1] = q_start[t] + ceil_div(s.nq, bq);
    k_start[t + 1] = k_start[t] + ceil_div(s.nk, bk);
  }
}

Block Plan::find(const int64_t* start, int64_t block, int tile, bool queries) const {
  // The last sequence that starts at or before the block; sequences without blocks are skipped.
  const int64_t t = std::upper_bound(start, start + num_sequences + 1, block) - start - 1;
  const spec::Sequence s = p.sequence(t);
  const int64_t index = block - start[t];
  const int64_t first = index * tile;
  const int64_t n = queries ? s.nq : s.nk;
  return {s, t, index, first, static_cast<int>(std::min<int64_t>(tile, n - first))};
}

}  // namespace sagebwd::cpu
