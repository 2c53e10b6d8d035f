// SPDX-License-Identifier: Apache-2.0
#include "cpu/plan.h"

#include <algorithm>
#include <thread>

#include "numerics/octaves.h"

namespace sagebwd::cpu {
namespace {

/// Work items the backward aims at, whatever the number of threads: results must not depend on it.
constexpr int64_t kBackwardItems = 32;
constexpr int64_t kMaxChunks = 8;

/// Chunks of a key head. The order in which dQ is added up follows from them, so they depend on
/// nothing but the heads and the length: not on threads, not on the rest of the batch.
int64_t chunks_of(int64_t key_heads, int64_t key_blocks) {
  const int64_t wanted = ceil_div(kBackwardItems, std::max<int64_t>(key_heads, 1));
  return std::clamp<int64_t>(std::min(wanted, key_blocks), 1, kMaxChunks);
}

}  // namespace

backend::Tiles tiles_of(const spec::Problem& p, const isa::Kernels& kernels) {
  return backend::any_tiles(p, kernels.p_levels);
}

Plan::Plan(const spec::Problem& problem, const isa::Kernels& kernels) : p(problem) {
  const backend::Tiles tiles = tiles_of(problem, kernels);
  bq = tiles.q, bk = tiles.k, p_levels = static_cast<float>(tiles.p_levels);
  dl = static_cast<int>(round_up(p.d, isa::kPanel));
  dk = static_cast<int>(round_up(p.d, isa::kContract));
  vl = static_cast<int>(round_up(p.dv, isa::kPanel));
  vk = static_cast<int>(round_up(p.dv, isa::kContract));
  dp_bf16 = kernels.store_bf16 != nullptr && p.dtype == Dtype::bf16;
  num_sequences = p.num_sequences();
  int64_t most_key_blocks = 0;
  if (p.packed()) {
    q_blocks = k_blocks = 0;
    for (int64_t t = 0; t < num_sequences; ++t) {
      const spec::Sequence s = p.sequence(t);
      q_blocks += ceil_div(s.nq, bq);
      k_blocks += ceil_div(s.nk, bk);
      most_query_blocks = std::max(most_query_blocks, ceil_div(s.nq, bq));
      most_key_blocks = std::max(most_key_blocks, ceil_div(s.nk, bk));
    }
  } else {
    most_query_blocks = ceil_div(p.nq, bq), most_key_blocks = ceil_div(p.nk, bk);
    q_blocks = p.b * most_query_blocks, k_blocks = p.b * most_key_blocks;
  }
  if (!paper()) octaves = numerics::octaves_of(most_key_blocks * bk);
  // A shorter sequence has a block in as many chunks as it has blocks, as if it were alone.
  chunks = static_cast<int>(chunks_of(p.hk, most_key_blocks));
  whole_heads = num_sequences * p.hk >= kBackwardItems;
  slots = worker_slots();
}

int worker_slots() {
  // The number of cores comes from a file, and reading that takes longer than a small call.
  static const int cores = static_cast<int>(std::thread::hardware_concurrency());
  return std::max(default_threads(), cores);
}

void Plan::place_tables(Arena& arena) {
  q_start = arena.take<int64_t>(num_sequences + 1);
  k_start = arena.take<int64_t>(num_sequences + 1);
  scale_start = arena.take<int64_t>(num_sequences + 1);
  lists.place(arena, p);
}

void Plan::fill_tables() {
  q_start[0] = k_start[0] = scale_start[0] = 0;
  for (int64_t t = 0; t < num_sequences; ++t) {
    const spec::Sequence s = p.sequence(t);
    q_start[t + 1] = q_start[t] + ceil_div(s.nq, bq);
    k_start[t + 1] = k_start[t] + ceil_div(s.nk, bk);
    scale_start[t + 1] = scale_start[t] + ceil_div(s.nk, kKeysPerScale);
  }
  lists.fill(p);
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
