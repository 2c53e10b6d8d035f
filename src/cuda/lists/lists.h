// SPDX-License-Identifier: Apache-2.0
// The caller's block lists (BlockLists in sagebwd/attention.h) as the main kernels walk them: per
// tile of queries, which tiles of keys, and for the backward the reverse.
//
// Lists lie on the device, where nobody has checked them. What is out of range is left out here, so
// the main kernels meet only tiles that exist. So is what the mask hides from all queries of a
// tile, and a block that stood in the list before.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "cuda/tile/sequences.h"

namespace sagebwd::cuda {

/// Queries of a tile of cuda-sm80, in both directions.
inline constexpr int kListedQueries = 64;

/// What a tile of queries has in the forward.
struct ListRow {
  int32_t steps;    // tiles of keys
  int32_t leading;  // the first of them, whose P·V is not in INT8 alone
};

/// A tile of queries, as a tile of keys lists it: where its first query is in the sequence, and
/// where in the workspace.
struct ListedQueries {
  int32_t query;
  uint32_t row;
};

/// What both directions read.
struct ListJob {
  Sequences seq;
  MaskParams mask;
  const int32_t *index, *count;  // count null: `width`
  int64_t width, rows, stride_batch, stride_head;
  int block_q, block_k, lead;
  int tile_q, tile_k;  // queries and keys of a tile; blocks have multiples of them
  int h, group;
  int64_t tq, tk;  // padded totals
};

/// Tiles of keys of every tile of queries, in the order of its list.
struct KeyLists {
  ListRow* rows;      // [h, tq / tile_q]
  int32_t* tiles;     // [h, tq / tile_q, width], counted from the first key of the sequence
  uint32_t* bits;     // [h, tq / tile_q, words]: which tiles a long row has
  int64_t width;      // places of a row
  int64_t key_tiles;  // of a sequence, or of all documents

  constexpr int64_t words() const { return (key_tiles + 31) / 32; }
};
void launch_key_lists(const ListJob& job, const KeyLists& to, cudaStream_t stream);

/// What one thread block of the backward does: a tile of keys with a part of its list.
struct Piece {
  int32_t key_tile;  // of all sequences; negative: nothing to do
  int32_t steps;     // tiles of queries,
  uint32_t end;      // those before this one among the entries of the key head
  int32_t cut;       // where its sums of dK and dV go in QueryLists::sums; negative: to the result,
                     // because it has the whole list
};

/// The pieces of a tile of keys whose list was cut, one behind the other in QueryLists::sums.
struct Cut {
  int32_t key_tile;
  int32_t pieces;  // 0: this is not the first of them
};

/// Tiles of queries of every tile of keys, in increasing order, those of the query heads of its key
/// head one after the other. The order does not depend on scheduling.
///
/// A lineup is the tiles of keys of a sequence, or of all documents, of one key head. In it the
/// list of a tile of keys is cut if it is more than twice as long as the mean: a block of keys that
/// everybody lists would be the work of one thread block, long after the others have ended. The
/// pieces of a lineup stand in the order of their keys and of their queries.
struct QueryLists {
  constexpr int64_t columns() const { return key_tiles * group; }  // of a lineup
  // Words of 32 bits: of a column of `bits`, and of a row of `row_bits`.
  constexpr int64_t words() const { return (query_tiles + 31) / 32; }
  constexpr int64_t row_words() const { return (key_tiles + 31) / 32; }
  /// Pieces of cut lists that a lineup may have. Where more would be wanted, they get longer.
  constexpr int64_t cut_places() const { return key_tiles / 4 + 2; }
  /// Pieces that it may have in all.
  constexpr int64_t piece_places() const { return key_tiles + cut_places(); }

  int tile_k, group;
  int64_t lineups;                 // of a key head
  int64_t query_tiles, key_tiles;  // of a lineup
  int64_t places;                  // for the entries of a lineup
  // These three lie together, from `bits` on, and are zero at the start.
  int64_t zero_words;
  uint32_t* bits;          // [hk, lineups, columns, words]: a bit per tile of queries
  uint32_t* start;         // [hk, lineups, columns + 1]: where the entries of a column start
  uint32_t* row_bits;      // [h, tq / kListedQueries, row_words]: a bit per tile of keys; null: no
                           // turns are wanted
  ListedQueries* entries;  // [hk, lineups, places]
  Piece* pieces;           // [hk, lineups, piece_places]
  Cut* cuts;               // [hk, lineups, cut_places], of which `cut_count` are in use
  uint32_t* cut_count;     // [hk, lineups]
  float* sums;             // [hk, lineups, cut_places, 2, tile_k, D]: dK and dV of a piece
};
void launch_query_lists(const ListJob& job, const QueryLists& to, cudaStream_t stream);

}  // namespace sagebwd::cuda
