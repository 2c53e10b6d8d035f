// SPDX-License-Identifier: Apache-2.0
// The pieces of work of the forward: up to kQueries queries of a head.
#pragma once

#include <cstdint>

#include "cuda/sm90/params.h"
#include "cuda/tile/sequence.cuh"
#include "cuda/tile/walk.cuh"

namespace sagebwd::cuda::sm90::fwd {

/// A piece of work. It lies in shared memory; the producer writes it.
struct Work {
  tile::Walk walk;  // over tiles of keys
  int head;
  int q0;         // first query, inside the sequence
  uint32_t row;   // the same in the workspace, heads included
  uint32_t keys;  // the sequence's first key in the workspace, heads included
  bool last;      // there is no work in it, nor any after it
  tile::Sequence s;
};

/// Piece `index` of all: heads behind one another, the last queries of a head first, because under
/// a causal mask they have the most keys. Blocks have kBlock queries and pieces 1.5 times as many:
/// of three blocks the first two have a piece. Returns false where there is none.
__device__ inline bool work_at(Work& w, const ForwardParams& p, uint32_t index) {
  constexpr int kQueries = 3 * kBlock / 2, kKeys = kBlock;
  w.head = static_cast<int>(index / static_cast<uint32_t>(p.q_blocks));
  const int block = p.q_blocks - 1 - static_cast<int>(index % static_cast<uint32_t>(p.q_blocks));
  w.s = tile::sequence_of_block<kBlock>(p.seq, block, true);
  const int local = block - static_cast<int>(w.s.q_pad / kBlock);
  if (local % 3 == 2) return false;
  w.q0 = (local / 3 * 2 + local % 3) * kQueries;
  if (w.q0 >= w.s.nq) return false;
  w.walk = tile::walk_keys(p.mask, w.s, w.q0, min(w.q0 + kQueries, w.s.nq) - 1, kKeys);
  w.row = static_cast<uint32_t>(w.head * p.tq + w.s.q_pad + w.q0);
  w.keys = static_cast<uint32_t>(w.head / p.group * p.tk + w.s.k_pad);
  w.last = false;
  return true;
}

}  // namespace sagebwd::cuda::sm90::fwd
