// SPDX-License-Identifier: Apache-2.0
// Which queries a thread block of the forward has, and which tiles of keys they visit.
#pragma once

#include <cstdint>
#include <type_traits>

#include "cuda/sm80/fwd/config.cuh"
#include "cuda/sm80/params.h"
#include "cuda/tile/sequence.cuh"
#include "cuda/tile/walk.cuh"

namespace sagebwd::cuda::sm80::fwd {

/// What a thread block works on. It lies in shared memory: the loop needs these numbers too seldom
/// to hold them in registers.
template <Config kConfig>
struct Work {
  std::conditional_t<kConfig.lists, tile::ListWalk, tile::Walk> walk;  // over tiles of keys
  tile::WholeTiles whole;  // tiles of keys that need no mask
  tile::WholeTiles plain;  // the same, but none if the call wants the largest logits
  int leading;             // the first steps of the walk, whose P·V runs in 16 bit
  float log_levels;        // log2 of the levels of P
  int head;
  uint32_t keys;  // the sequence's first key in the workspace
  int q0;         // the block's first query, inside the sequence
  tile::Band band;
  tile::Sequence s;

  __device__ bool has_no_queries() const { return q0 >= s.nq; }
};

/// The work of the block-th kConfig.queries() queries.
template <Config kConfig>
__device__ Work<kConfig> work_of(const ForwardParams& p, int block) {
  constexpr int kQueries = kConfig.queries(), kTileK = kConfig.tile_k;
  Work<kConfig> w;
  w.s = tile::sequence_of_block<kBlock>(p.seq, block * kQueries / kBlock, true);
  w.band = tile::band_of(p.mask, w.s);
  w.q0 = static_cast<int>(static_cast<int64_t>(block) * kQueries - w.s.q_pad);
  const int last = min(w.q0 + kQueries, w.s.nq) - 1;
  w.whole = tile::whole_keys(p.mask, w.s, w.q0, last, kTileK);
  w.plain = p.max_logit == nullptr ? w.whole : tile::WholeTiles{0, 0};
  w.head = static_cast<int>(blockIdx.y);
  if constexpr (kConfig.lists) {
    const int64_t row = w.head * (p.tq / kQueries) + block;
    const ListRow listed = p.lists.rows[row];
    w.walk = {p.lists.tiles + row * p.lists.width, listed.steps};
    w.leading = listed.leading;
  } else {
    w.walk = tile::walk_keys(p.mask, w.s, w.q0, last, kTileK);
    w.leading = p.v16_is_v ? w.walk.steps : 0;
  }
  w.keys = static_cast<uint32_t>(w.head / p.group * p.tk + w.s.k_pad);
  w.log_levels = log2f(p.p_levels);
  return w;
}

}  // namespace sagebwd::cuda::sm80::fwd
