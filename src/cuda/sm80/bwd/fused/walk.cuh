// SPDX-License-Identifier: Apache-2.0
// Which keys a thread block of the fused backward has, which tiles of queries it visits, and in
// which order.
#pragma once

#include <cstdint>
#include <type_traits>

#include "cuda/sm80/bwd/fused/config.cuh"
#include "cuda/sm80/params.h"
#include "cuda/tile/sequence.cuh"
#include "cuda/tile/tickets.cuh"
#include "cuda/tile/walk.cuh"

namespace sagebwd::cuda::sm80::fused_backward {

/// The same number, but the compiler knows that all lanes have it: lane i votes for bit i.
__device__ inline uint32_t uniform(uint32_t x) {
  return __ballot_sync(0xffffffffu, x >> (threadIdx.x % 32) & 1);
}

/// Which keys a thread block has: the block-th tile_k of a key head.
template <Config kConfig>
struct Place {
  uint32_t drawn_block, drawn_head;

  /// All threads come here. `memory` is free again when it returns.
  __device__ static Place take(const BackwardParams& p, uint8_t* memory) {
    if constexpr (!kConfig.general()) return {0, 0};
    tile::Tickets::Keys& shared = *reinterpret_cast<tile::Tickets::Keys*>(memory);
    if (threadIdx.x == 0) {
      const tile::Tickets tickets(p, gridDim, kConfig.tile_q(), kConfig.resident);
      shared = tickets.keys_of(atomicAdd(p.tickets, 1u));
    }
    __syncthreads();
    const tile::Tickets::Keys drawn = shared;
    __syncthreads();
    return {uniform(drawn.block), uniform(drawn.head)};
  }
  /// Without turns the grid starts with the first keys: in a causal sequence they have the most
  /// queries.
  __device__ int block() const {
    return static_cast<int>(!kConfig.general() ? blockIdx.x : drawn_block);
  }
  __device__ int kv_head() const {
    return static_cast<int>(!kConfig.general() ? blockIdx.y : drawn_head);
  }
};

/// A tile of queries: where its first query is in the sequence, and where in the workspace.
using Tile = ListedQueries;

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
  /// How many thread blocks add to the tile's dQ before this one: those of the keys behind that
  /// one of its queries sees.
  template <Config kConfig>
  __device__ uint32_t turn(const BackwardParams&, const Tile& t) const {
    constexpr int kTileQ = kConfig.tile_q(), kTileK = kConfig.tile_k();
    const int last = min(t.query + kTileQ, s.nq) - 1;
    return static_cast<uint32_t>(tile::last_key_tile(band, s, last, kTileK) - key0 / kTileK);
  }
  /// What the uniforms of the dither depend on.
  struct Coordinates {
    int head, query_tile;
  };
  template <Config kConfig>
  __device__ Coordinates coordinates(const BackwardParams& p, int step) const {
    constexpr int kTileQ = kConfig.tile_q();
    const int per_head = (end - first) / kTileQ;
    return {first_head(p) + step / per_head, first / kTileQ + step % per_head};
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

/// The walk over the query tiles of a piece. Loops count down the tiles that are left, and find
/// those that they need next in shared memory (SharedPlan::ring). There is no band of queries, so
/// `first` and `end` are those of the piece: Piece::cut and Piece::end.
struct ListedWalk : Walk {
  __device__ int cut() const { return first; }
  __device__ const Tile* list_end(const BackwardParams& p) const {
    return p.lists.entries + kv_head * p.lists.lineups * p.lists.places + end;
  }
  __device__ Tile first_tile(const BackwardParams& p, int /*head*/) const {
    return steps > 0 ? list_end(p)[-steps] : Tile{};
  }
  /// The same for those of the keys behind that list the tile. The whole warp comes here.
  template <Config kConfig>
  __device__ uint32_t turn(const BackwardParams& p, const Tile& t) const {
    constexpr int kTileQ = kConfig.tile_q(), kTileK = kConfig.tile_k();
    const int words = static_cast<int>(p.lists.row_words()),
              mine = static_cast<int>((p.seq.documents == nullptr ? 0 : s.k_pad) + key0) / kTileK;
    const uint32_t* row = p.lists.row_bits + static_cast<int64_t>(t.row / kTileQ) * words;
    uint32_t count = 0;
    for (int at = mine / 32 + static_cast<int>(threadIdx.x % 32); at < words; at += 32) {
      const uint32_t behind = at > mine / 32 ? 0xffffffffu : ~((2u << (mine % 32)) - 1);
      count += static_cast<uint32_t>(__popc(row[at] & behind));
    }
#pragma unroll
    for (int step = 16; step > 0; step /= 2) count += __shfl_xor_sync(0xffffffffu, count, step);
    return count;
  }
};

template <Config kConfig>
using WalkOf = std::conditional_t<kConfig.lists(), ListedWalk, Walk>;

/// The walk over the queries that see the keys of a place. Lists have pieces instead of places.
template <Config kConfig>
__device__ WalkOf<kConfig> walk_of(const BackwardParams& p, const Place<kConfig>& place) {
  constexpr int kTileQ = kConfig.tile_q(), kTileK = kConfig.tile_k();
  int block = place.block();
  WalkOf<kConfig> w;
  if constexpr (kConfig.lists()) {
    const Piece piece = p.lists.pieces[static_cast<int64_t>(place.kv_head()) * gridDim.x + block];
    block = piece.key_tile;
    w.steps = piece.steps, w.first = piece.cut, w.end = static_cast<int>(piece.end);
    w.next_head = 0;
    if (block < 0) {
      w.key0 = w.s.nk = 0;
      return w;
    }
  }
  w.s = tile::sequence_of_block<kBlock>(p.seq, block * kTileK / kBlock, false);
  w.key0 = static_cast<int>(static_cast<int64_t>(block) * kTileK - w.s.k_pad);
  w.zero = 0;
  w.kv_head = place.kv_head();
  w.band = tile::band_of(p.mask, w.s);
  const int last_key = min(w.key0 + kTileK, w.s.nk) - 1;
  const tile::QueryRange seen = tile::visible_to(p.mask, w.s, w.key0, last_key);
  const tile::WholeQueries whole =
      tile::whole_queries(p.mask, w.s, w.key0, last_key, w.key0 + kTileK <= w.s.nk, kTileQ);
  w.whole_begin = whole.begin, w.whole = whole.more;
  if constexpr (!kConfig.lists()) {
    const tile::QueryWalk tiles = tile::query_walk_of(seen, kTileQ);
    w.first = tiles.first;
    w.end = w.first + tiles.steps * kTileQ, w.steps = tiles.steps * p.group;
    w.next_head = static_cast<uint32_t>(p.tq - tiles.steps * kTileQ);
  }
  return w;
}

}  // namespace sagebwd::cuda::sm80::fused_backward
