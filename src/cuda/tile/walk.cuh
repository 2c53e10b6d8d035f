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

/// The tiles of the other side that a block visits. Today a band of the score matrix: neighbouring
/// tiles, in increasing order.
struct Walk {
  int first, steps;

  /// The tile of a step, counted from the first token of the sequence.
  __device__ __forceinline__ int tile(int step) const { return first + step; }
  /// The tile of step + 1 for a loop that holds that of `step`: the band then asks no memory.
  __device__ __forceinline__ int next(int /*step*/, int tile) const { return tile + 1; }
  /// Steps, from the first on, that belong to the leading `tiles` tiles of the recipe.
  __device__ int leading(int64_t tiles) const {
    const int64_t count = tiles - first;
    return count < 0 ? 0 : count > steps ? steps : static_cast<int>(count);
  }
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

}  // namespace sagebwd::cuda::tile
