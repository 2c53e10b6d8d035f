// SPDX-License-Identifier: Apache-2.0
// Which keys a thread block of the backward has, and which tiles of queries it visits.
#pragma once

#include <cstdint>

#include "cuda/arch/mbarrier.cuh"
#include "cuda/sm90/bwd/bwd.h"
#include "cuda/sm90/params.h"
#include "cuda/tile/sequence.cuh"
#include "cuda/tile/tickets.cuh"
#include "cuda/tile/walk.cuh"

namespace sagebwd::cuda::sm90::bwd {

inline constexpr int kConsumers = 2;           // warpgroups with 64 keys each
inline constexpr int kKeys = 64 * kConsumers;  // of a thread block
inline constexpr int kWarpgroup = 128;         // threads

/// Barriers by name. That of all threads has the number 0.
enum class Meeting { first_consumer = 1, second_consumer, dq_maker };
/// The one of a warpgroup.
constexpr Meeting meeting_of(int warpgroup) {
  return static_cast<Meeting>(static_cast<int>(Meeting::first_consumer) + warpgroup);
}
__device__ __forceinline__ void meet(Meeting at) { arch::warpgroup_barrier(static_cast<int>(at)); }

static_assert(kKeys == kBlock && kKeys == kBackwardKeys);

/// A tile of queries has one or two slabs, of 64 queries each.
template <int D>
inline constexpr int kQueries = backward_queries(D);
template <int D>
inline constexpr int kSlabs = kQueries<D> / kSlab;

/// What a call may want of the kernel.
enum class Wants {
  nothing,
  turns,       // dQ is added up in a fixed order: turns.cuh
  what_comes,  // turns, and row sums of dS (row_sums.cuh), each if the call gives memory for it
};

/// The walk of a thread block: all query heads of its key head, and of each head the tiles that see
/// one of its keys.
struct Walk {
  int first, end;      // queries of a head that see a key of the block, in whole tiles
  int queries;         // of all heads
  uint32_t row;        // the first query in the workspace, heads included
  uint32_t next_head;  // rows from the end of a head to its first tile in the next head
  // A tile needs no mask if it starts at whole_begin or up to `whole` queries later.
  int whole_begin;
  uint32_t whole;
  int key0;  // first key, inside the sequence
  int kv_head;
  uint32_t key_row;  // the same in the workspace, heads included
  int part, parts;   // of the walk, if several thread blocks share it: parts.cuh
  int first_part;
  tile::Sequence s;
  tile::Band band;  // worked out once, because tiles have no registers for it

  /// How many tiles of so many queries need no mask, from this query up to the end of the head.
  __device__ int whole_tiles(int query, int queries) const {
    const int more = whole_begin + static_cast<int>(whole) - query;
    return query < whole_begin || more < 0 ? 0 : min(more, end - queries - query) / queries + 1;
  }
};

/// A place on the walk, in steps of kSize queries. It has its own copy of what it needs of the
/// walk, in registers.
template <int kSize>
struct Step {
  int left;      // steps from here on, this one included
  int query;     // the first query, inside the sequence
  uint32_t row;  // the same in the workspace
  int first, end;
  uint32_t next_head;

  __device__ explicit Step(const Walk& w)
      : left(w.queries / kSize),
        query(w.first),
        row(w.row),
        first(w.first),
        end(w.end),
        next_head(w.next_head) {}
  __device__ __forceinline__ void advance() {
    --left, query += kSize, row += kSize;
    if (query >= end) query = first, row += next_head;
  }
};

/// The keys of a thread block, and which part of their walk it has.
struct Share {
  int block, kv_head;
  int part, parts;  // 0 parts: there is no work left for it
  int first_part;   // place of the walk's first part among those of all walks
};
/// By its number. One head of one sequence comes behind the other: side by side their sums of dQ
/// and their queries would compete for the second-level cache. The first keys of a causal sequence
/// have the most queries, and each begins with them. Of the last few heads and sequences all begin
/// with them: what then comes last is short everywhere, and no multiprocessor works on while the
/// others have nothing left.
__device__ inline Share share_of(const BackwardParams& p) {
  const int x = static_cast<int>(blockIdx.x), y = static_cast<int>(blockIdx.y),
            blocks = static_cast<int>(gridDim.x), all = p.hk * blocks, number = y * blocks + x;
  // Most of them come this way, without a division.
  if (number < all - max(p.parted, p.mixed_heads * p.seq.k_blocks)) return {x, y, 0, 1, 0};
  if (p.parted > 0) {
    const int at = number - (all - p.parted), walk = at / p.parts, mine = all - p.parted + walk;
    if (mine >= all) return {};
    return {mine % blocks, mine / blocks, at - walk * p.parts, p.parts, walk * p.parts};
  }
  const int mixed = p.mixed_heads, each = p.seq.k_blocks, at = number - (all - mixed * each);
  const int unit = p.hk * p.seq.count - mixed + at % mixed;  // a head of a sequence
  return {unit % p.seq.count * each + at / mixed, unit / p.seq.count, 0, 1, 0};
}

/// One thread of a thread block comes here, once.
template <int D, Wants kWants>
__device__ Walk walk_of(const BackwardParams& p) {
  Walk w;
  const Share share = share_of(p);
  if (share.parts == 0) {
    w.key0 = w.s.nk = 0;
    return w;
  }
  int block = share.block;
  w.kv_head = share.kv_head;
  w.part = share.part, w.parts = share.parts, w.first_part = share.first_part;
  if (kWants == Wants::turns || (kWants == Wants::what_comes && p.turns != nullptr)) {
    const tile::Tickets tickets(p, gridDim, kQueries<D>, 1);
    const auto [drawn, head] = tickets.keys_of(atomicAdd(p.tickets, 1u));
    block = static_cast<int>(drawn), w.kv_head = static_cast<int>(head);
  }
  w.s = tile::sequence_of_block<kBlock>(p.seq, block, false);
  w.key0 = static_cast<int>(static_cast<int64_t>(block) * kKeys - w.s.k_pad);
  w.key_row = static_cast<uint32_t>(w.kv_head * p.tk + static_cast<int64_t>(block) * kKeys);
  const int last = min(w.key0 + kKeys, w.s.nk) - 1;
  const tile::QueryWalk queries =
      tile::query_walk_of(tile::visible_to(p.mask, w.s, w.key0, last), kQueries<D>);
  w.first = queries.first, w.end = queries.first + queries.steps * kQueries<D>;
  if (w.parts > 1) {
    w.end = w.first + queries.steps * (w.part + 1) / w.parts * kQueries<D>;
    w.first += queries.steps * w.part / w.parts * kQueries<D>;
  }
  w.queries = (w.end - w.first) * p.group;
  w.row =
      static_cast<uint32_t>(static_cast<int64_t>(w.kv_head) * p.group * p.tq + w.s.q_pad + w.first);
  w.next_head = static_cast<uint32_t>(p.tq - (w.end - w.first));
  const tile::WholeQueries whole =
      tile::whole_queries(p.mask, w.s, w.key0, last, last == w.key0 + kKeys - 1, kQueries<D>);
  w.whole_begin = whole.begin, w.whole = whole.more;
  w.band = tile::band_of(p.mask, w.s);
  return w;
}

}  // namespace sagebwd::cuda::sm90::bwd
