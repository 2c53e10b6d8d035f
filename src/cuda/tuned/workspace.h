// SPDX-License-Identifier: Apache-2.0
// What lies where in a call's workspace, as far as both architectures have it.
#pragma once

#include <cstddef>
#include <cstdint>

#include "cuda/host/arena.h"
#include "cuda/lists/lists.h"
#include "cuda/tile/sequences.h"
#include "cuda/tuned/operands.h"
#include "cuda/tuned/plan.h"
#include "spec/problem.h"

namespace sagebwd::cuda::tuned {

/// Saved codes (sagebwd/codes.h) take the place of some pieces: of the centres, and of
/// row-major codes where those have the same layout.
struct SharedSpace {
  /// `turns`: counters of a backward that adds to dQ in turn.
  SharedSpace(const spec::Problem& p, const Plan& plan, Arena& arena, int64_t most_turns = 0) {
    const bool forward = p.direction == spec::Direction::forward;
    const bool paper = p.recipe.scheme == Scheme::paper;
    const int64_t heads = plan.num_sequences * p.hk;
    zeros = arena.take<std::byte>(0);
    const size_t before = arena.used();
    next = arena.take<uint32_t>(1), tickets = arena.take<uint32_t>(1);
    if (paper) {
      k_arrived = arena.take<uint32_t>(heads);
      k_mean = arena.take<float>(heads * plan.padded_d);
      k_turned = arena.take<float>(heads * plan.padded_d);
    }
    if (forward) {
      max_logit = arena.take<uint32_t>(plan.num_sequences * p.h);
    } else {
      if (p.deterministic) turns = arena.take<uint32_t>(most_turns);
      if (p.adds_row_sums()) row_sum = arena.take<float>(p.h * plan.tq);
    }
    zero_bytes = arena.used() - before;
    documents = arena.take<DocumentStart>(p.packed() ? p.documents.count + 1 : 0);
    const int64_t parts = p.hk * plan.k_blocks;
    if (paper)
      k_part = arena.take<double>(parts * plan.padded_d), k_part_tokens = arena.take<int>(parts);
    if (!paper && !p.has_codes) {
      for (Centres* each : {&centres, &value_centres}) {
        each->blocks = plan.k_blocks;
        each->codes = arena.take<int8_t>(p.hk * plan.k_blocks * p.d);
        each->scale = arena.take<float>(p.hk * plan.k_blocks);
      }
    }
    if (!plan.q8_is_saved) q8 = arena.take<int8_t>(p.h * plan.tq * plan.padded_d);
    if (!plan.k8_is_saved) k8 = arena.take<int8_t>(p.hk * plan.tk * plan.padded_d);
  }
  std::byte* zeros;  // zero_bytes bytes that a call sets to zero: next … row_sum
  size_t zero_bytes;
  uint32_t *next, *k_arrived = nullptr;
  float *k_mean = nullptr, *k_turned = nullptr;
  uint32_t* max_logit = nullptr;
  uint32_t *tickets, *turns = nullptr;
  float* row_sum = nullptr;
  DocumentStart* documents;
  double* k_part = nullptr;
  int* k_part_tokens = nullptr;
  Centres centres, value_centres;
  int8_t *q8 = nullptr, *k8 = nullptr;
};

/// Room for the list of pieces of work of the kernel that makes operands.
inline Item* take_items(const spec::Problem& p, const Plan& plan, Arena& arena) {
  return reinterpret_cast<Item*>(arena.take<std::byte>(
      most_items(p.hk, p.group(), plan.q_blocks, plan.k_blocks) * kItemBytes));
}

/// Room for the lists of a forward with such tiles.
inline KeyLists take_key_lists(const spec::Problem& p, const Plan& plan, Arena& arena, int tile_q,
                               int tile_k) {
  const int64_t rows = p.h * plan.tq / tile_q;
  KeyLists lists{};
  lists.width = p.blocks.width * (p.blocks.block_k / tile_k);
  lists.key_tiles = plan.tk / tile_k / sequences_apart(p);
  lists.rows = arena.take<ListRow>(rows);
  lists.tiles = arena.take<int32_t>(rows * lists.width + 1);
  lists.bits = arena.take<uint32_t>(rows * lists.words());
  return lists;
}

}  // namespace sagebwd::cuda::tuned
