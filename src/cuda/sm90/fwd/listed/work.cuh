// SPDX-License-Identifier: Apache-2.0
// The pieces of work of the forward with block lists: the queries of one row of them.
#pragma once

#include <cstdint>

#include "cuda/sm90/params.h"
#include "cuda/tile/sequence.cuh"
#include "cuda/tile/walk.cuh"

namespace sagebwd::cuda::sm90::fwd::listed {

inline constexpr int kHalf = kSlab;  // keys of half a stage: what the kernel calls a tile

/// A piece of work. It lies in shared memory; the producer writes it. What it counts is what is
/// left of a list (cuda/lists), and nobody counts again.
struct Work {
  int entries;  // of the list
  int steps;    // stages
  int leading;  // the first of them, whose P·V has twice as many bits
  int head;
  int q0;                     // first query, inside the sequence
  uint32_t row;               // the same in the workspace, heads included
  uint32_t keys;              // the sequence's first key in the workspace, heads included
  bool last;                  // there is no work in it, nor any after it
  tile::WholeTiles whole[2];  // tiles in which nothing is masked for a consumer's 64 queries
  tile::Sequence s;
};

/// The entries of its list: tiles of keys.
__device__ inline const int32_t* entries_of(const Work& w, const ListedParams& p) {
  return p.lists.tiles + static_cast<int64_t>(w.row / kBlock) * p.lists.width;
}

/// Piece `index` of all: heads behind one another, the last queries of a head first, because under
/// a causal mask they have the most keys. Returns false for the padding of sequences.
__device__ inline bool work_at(Work& w, const ListedParams& p, uint32_t index) {
  w.head = static_cast<int>(index / static_cast<uint32_t>(p.q_blocks));
  const int block = p.q_blocks - 1 - static_cast<int>(index % static_cast<uint32_t>(p.q_blocks));
  w.s = tile::sequence_of_block<kBlock>(p.seq, block, true);
  w.q0 = static_cast<int>(static_cast<int64_t>(block) * kBlock - w.s.q_pad);
  if (w.q0 >= w.s.nq) return false;
  w.row = static_cast<uint32_t>(w.head * p.tq + w.s.q_pad + w.q0);
  w.keys = static_cast<uint32_t>(w.head / p.group * p.tk + w.s.k_pad);
  const ListRow row = p.lists.rows[w.row / kBlock];
  const int per_step = p.whole_stages ? 1 : 2;
  w.entries = row.steps;
  w.steps = (row.steps + per_step - 1) / per_step;
  w.leading = (row.leading + per_step - 1) / per_step;
#pragma unroll
  for (int i = 0; i < 2; ++i)
    w.whole[i] = tile::whole_keys(p.mask, w.s, w.q0 + 64 * i, w.q0 + 64 * i + 63, kHalf);
  w.last = false;
  return true;
}

}  // namespace sagebwd::cuda::sm90::fwd::listed
