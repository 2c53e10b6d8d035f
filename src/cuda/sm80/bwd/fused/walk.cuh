// SPDX-License-Identifier: Apache-2.0
// Which tiles of queries a thread block of the fused backward visits, and in which order.
#pragma once

#include <cstdint>

#include "cuda/sm80/bwd/fused/config.cuh"
#include "cuda/sm80/params.h"
#include "cuda/tile/sequence.cuh"

namespace sagebwd::cuda::sm80::fused_backward {

/// A tile of queries: where its first query is in the sequence, and where in the workspace.
struct Tile {
  int query;
  uint32_t row;
};

/// The walk of a thread block: all query heads of its key head, and of each head the tiles that see
/// one of its keys. A copy lies in shared memory, for what the loop needs too seldom to hold it in
/// registers.
struct Walk {
  int first, end;      // queries of a head that see a key of the block, in whole tiles
  uint32_t next_head;  // rows from there to the first of the next head
  int steps;           // tiles of all heads
  // A tile needs no mask if it starts at whole_begin or up to `whole` queries later.
  int whole_begin;
  uint32_t whole;
  int key0;  // first key of the block, inside the sequence
  int kv_head;
  uint32_t zero;  // the compiler does not know that it is
  tile::Band band;
  tile::Sequence s;

  __device__ bool has_no_keys() const { return key0 >= s.nk; }
  __device__ int first_head(const BackwardParams& p) const { return kv_head * p.group; }
  __device__ Tile first_tile(const BackwardParams& p, int head) const {
    return {first, static_cast<uint32_t>(head * p.tq + s.q_pad + first)};
  }
  __device__ bool needs_mask(const Tile& t) const {
    return static_cast<uint32_t>(t.query - whole_begin) > whole;
  }
  /// Goes on to the next tile. True if that is the first of the next head.
  template <Config kConfig>
  __device__ bool advance(Tile& t) const {
    t.query += kConfig.tile_q(), t.row += kConfig.tile_q();
    if (t.query < end) return false;
    t.query = first, t.row += next_head;
    return true;
  }
};

/// The walk over the queries of the block-th kTileK keys.
template <Config kConfig>
__device__ Walk walk_of(const BackwardParams& p, int block) {
  constexpr int kTileQ = kConfig.tile_q(), kTileK = kConfig.tile_k();
  Walk w;
  w.s = tile::sequence_of_block<kBlock>(p.seq, block * kTileK / kBlock, false);
  w.key0 = static_cast<int>(static_cast<int64_t>(block) * kTileK - w.s.k_pad);
  w.zero = 0;
  w.kv_head = static_cast<int>(blockIdx.y);
  w.band = tile::band_of(p.mask, w.s);
  const int last_key = min(w.key0 + kTileK, w.s.nk) - 1;
  const tile::QueryRange range = tile::visible_to(p.mask, w.s, w.key0, last_key);
  const tile::QueryRange of_first = tile::visible_to(p.mask, w.s, w.key0, w.key0);
  const tile::QueryRange of_last = w.key0 + kTileK <= w.s.nk
                                       ? tile::visible_to(p.mask, w.s, last_key, last_key)
                                       : tile::QueryRange{0, 0};
  const int whole_begin = max(of_first.begin, of_last.begin),
            whole = min(of_first.end, of_last.end) - kTileQ - whole_begin;
  w.whole_begin = whole < 0 ? 0x7fffffff : whole_begin, w.whole = whole < 0 ? 0 : whole;
  w.first = range.begin / kTileQ * kTileQ;
  const int per_head = range.begin < range.end ? (range.end - w.first + kTileQ - 1) / kTileQ : 0;
  w.end = w.first + per_head * kTileQ, w.steps = per_head * p.group;
  w.next_head = static_cast<uint32_t>(p.tq - per_head * kTileQ);
  return w;
}

}  // namespace sagebwd::cuda::sm80::fused_backward
