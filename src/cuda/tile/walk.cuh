// SPDX-License-Identifier: Apache-2.0
// Which tiles of keys a block of queries visits, and the reverse. Loops count steps, ask which tile
// a step is, and assume nothing about the order.
#pragma once

#include <cstdint>

#include "cuda/tile/sequence.cuh"
#include "cuda/tile/sequences.h"

namespace sagebwd::cuda::tile {

/// Keys that at least one of the queries first … last sees.
__device__ inline Range keys_seen(const MaskParams& m, const Sequence& s, int first, int last) {
  const Range r{visible(m, s, first).begin, visible(m, s, last).end};
  return r.begin < r.end ? r : Range{0, 0};
}

/// The tiles of the other side that a block visits, for a band of the score matrix: neighbouring
/// tiles, in increasing order.
struct Walk {
  int first, steps;

  /// The tile of a step, counted from the first token of the sequence.
  __device__ __forceinline__ int tile(int step) const { return first + step; }
  /// The tile of step + 1 for a loop that holds that of `step`: the band then asks no memory.
  __device__ __forceinline__ int next(int /*step*/, int tile) const { return tile + 1; }
};

/// The tiles of a list (cuda/lists), in its order.
struct ListWalk {
  const int32_t* tiles;  // one place more than there are steps may be read
  int steps;

  __device__ __forceinline__ int tile(int step) const { return tiles[step]; }
  __device__ __forceinline__ int next(int step, int /*tile*/) const { return tiles[step + 1]; }
};

/// Tiles of `tile` tokens that hold some of the range.
__device__ inline Walk walk_of(const Range& seen, int tile) {
  if (seen.begin >= seen.end) return {0, 0};
  const int first = seen.begin / tile;
  return {first, (seen.end + tile - 1) / tile - first};
}

/// The key tiles of the queries first … last.
__device__ inline Walk walk_keys(const MaskParams& m, const Sequence& s, int first, int last,
                                 int tile) {
  return walk_of(keys_seen(m, s, first, last), tile);
}

/// The last tile of walk_keys for queries that see a key, in few instructions.
__device__ inline int last_key_tile(const Band& band, const Sequence& s, int last, int tile) {
  return (min(last + band.end, s.nk) - 1) / tile;
}

/// Tiles in which nothing is masked.
struct WholeTiles {
  int begin, end;
  __device__ __forceinline__ bool holds(int tile) const { return tile >= begin && tile < end; }
};

/// Key tiles that each of the queries first … last sees whole.
__device__ inline WholeTiles whole_keys(const MaskParams& m, const Sequence& s, int first, int last,
                                        int tile) {
  // Both ends of what a query sees grow with it.
  return {(visible(m, s, last).begin + tile - 1) / tile, visible(m, s, first).end / tile};
}

/// The query tiles that a block of keys visits. Loops over queries count tokens, so this does too.
struct QueryWalk {
  int first;  // query where the first tile starts
  int steps;
};

/// Tiles of `tile` queries that hold some of the range.
__device__ inline QueryWalk query_walk_of(const QueryRange& seen, int tile) {
  const int begin = seen.begin / tile * tile;
  return {begin, seen.begin < seen.end ? (seen.end - begin + tile - 1) / tile : 0};
}

/// Query tiles in which nothing is masked: those that start at `begin` or up to `more` queries
/// later.
struct WholeQueries {
  int begin;
  uint32_t more;
};

/// Query tiles that see each of the keys first … last. all_there: whether the block has no keys
/// behind the last one; those would have to be masked.
__device__ inline WholeQueries whole_queries(const MaskParams& m, const Sequence& s, int first,
                                             int last, bool all_there, int tile) {
  const QueryRange of_first = visible_to(m, s, first, first);
  const QueryRange of_last = all_there ? visible_to(m, s, last, last) : QueryRange{0, 0};
  const int begin = max(of_first.begin, of_last.begin),
            more = min(of_first.end, of_last.end) - tile - begin;
  return {more < 0 ? 0x7fffffff : begin, static_cast<uint32_t>(more < 0 ? 0 : more)};
}

}  // namespace sagebwd::cuda::tile
