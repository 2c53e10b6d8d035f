// SPDX-License-Identifier: Apache-2.0
#include "cuda/host/launch.h"
#include "cuda/lists/listed.cuh"
#include "cuda/lists/lists.h"
#include "cuda/tile/layout.h"

namespace sagebwd::cuda {
namespace {

using namespace lists;

constexpr int kScanThreads = 1024;
// Pieces of a cut list have more tiles than half of these: each loads its keys, and writes sums
// that somebody adds up.
constexpr uint32_t kShortestCut = 8;

struct KeyListsParams {
  ListJob job;
  KeyLists to;
};

/// A warp makes a row. A block that stands in a list twice counts where it stands first.
__global__ void __launch_bounds__(kThreads)
    key_lists_kernel(const __grid_constant__ KeyListsParams p) {
  const int64_t per_head = p.job.tq / p.job.tile_q, at = warp_index();
  if (at >= p.job.h * per_head) return;
  const Listed<kBlock> row(p.job, static_cast<int>(at / per_head), at % per_head);
  const int64_t lead_items = p.job.lead < 0 ? row.items : int64_t{p.job.lead} * row.per_block;
  int32_t* const tiles = p.to.tiles + at * p.to.width;
  uint32_t* const bits = p.to.bits + at * p.to.words();
  const bool is_long = row.items > 32;  // else the lanes see all of it at once
  if (is_long) {
    for (int64_t word = lane_index(); word < p.to.words(); word += 32) bits[word] = 0;
    __syncwarp();
  }
  const uint32_t before_me = (1u << lane_index()) - 1;
  int steps = 0, leading = 0;
  for (int64_t first = 0; first < row.items; first += 32) {
    const int64_t item = first + lane_index();
    const int tile = row.tile(p.job, item);
    const uint32_t same = __match_any_sync(kAll, tile);
    bool is_new = tile >= 0 && (same & before_me) == 0;
    if (is_new && is_long) {
      const uint32_t mask = 1u << (tile % 32);
      is_new = (atomicOr(bits + tile / 32, mask) & mask) == 0;
    }
    const uint32_t there = __ballot_sync(kAll, is_new),
                   leads = __ballot_sync(kAll, is_new && item < lead_items);
    if (is_new) tiles[steps + __popc(there & before_me)] = tile;
    steps += __popc(there), leading += __popc(leads);
  }
  if (lane_index() == 0) p.to.rows[at] = {steps, leading};
}

struct QueryListsParams {
  ListJob job;
  QueryLists to;
};

/// Where the start of a column stands; columns count over all key heads.
__device__ int64_t start_of(const QueryLists& lists, int64_t column) {
  return column + column / lists.columns();
}

/// Sets the bits of a row, and counts those of each column. A warp takes a row.
__global__ void __launch_bounds__(kThreads)
    count_kernel(const __grid_constant__ QueryListsParams p) {
  const int64_t per_head = p.job.tq / kListedQueries, at = warp_index();
  if (at >= p.job.h * per_head) return;
  const int head = static_cast<int>(at / per_head), kv_head = head / p.job.group;
  const Listed<kBlock> row(p.job, head, at % per_head);
  const int64_t bit = p.job.seq.documents == nullptr ? row.q0 / kListedQueries : at % per_head;
  for (int64_t item = lane_index(); item < row.items; item += 32) {
    const int tile = row.tile(p.job, item);
    if (tile < 0) continue;
    const int64_t key_tiles = p.to.lineups * p.to.key_tiles,
                  column = (kv_head * key_tiles + row.s.k_pad / p.job.tile_k + tile) * p.job.group +
                           head % p.job.group;
    const uint32_t mask = 1u << (bit % 32);
    const uint32_t before = atomicOr(p.to.bits + column * p.to.words() + bit / 32, mask);
    // A block that stands in a row twice counts once.
    if ((before & mask) == 0) atomicAdd(p.to.start + start_of(p.to, column), 1u);
    if (p.to.row_bits == nullptr) continue;
    const int64_t key_tile =
        tile + (p.job.seq.documents == nullptr ? 0 : row.s.k_pad / p.job.tile_k);
    atomicOr(p.to.row_bits + at * p.to.row_words() + key_tile / 32, 1u << (key_tile % 32));
  }
}

/// Sums over the numbers of all threads of a block, up to each one and in all.
template <typename V>
__device__ tile::Scanned<V> add_up(V x) {
  __shared__ V shared[kScanThreads / 32];
  return tile::scan_block(x, shared, [](V a, V b) { return a + b; });
}

/// Makes starts of the counts of a lineup, and cuts its long lists. A thread block takes a lineup.
__global__ void __launch_bounds__(kScanThreads)
    pieces_kernel(const __grid_constant__ QueryListsParams p) {
  const QueryLists& to = p.to;
  const int64_t columns = to.columns(), lineup = blockIdx.x, me = threadIdx.x;
  uint32_t* const start = to.start + lineup * (columns + 1);
  uint32_t total = 0;
  for (int64_t first = 0; first < columns; first += kScanThreads) {
    const int64_t column = first + me;
    const uint32_t count = column < columns ? start[column] : 0;
    const tile::Scanned<uint32_t> sums = add_up(count);
    if (column < columns) start[column] = total + sums.here - count;
    total += sums.all;
  }
  if (me == 0) start[columns] = total;
  __syncthreads();

  // How many pieces a list is cut into; 1: it is not cut.
  const auto pieces_of = [&](int64_t tile, uint32_t longest) -> uint32_t {
    if (tile >= to.key_tiles) return 0;
    const uint32_t count = start[(tile + 1) * to.group] - start[tile * to.group];
    return count > longest ? (count + longest - 1) / longest : 1;
  };
  const int64_t tiles = max(to.key_tiles, int64_t{1});
  uint32_t longest =
      max(static_cast<uint32_t>((int64_t{2} * total + tiles - 1) / tiles), kShortestCut);
  for (;; longest += longest / 4) {
    uint32_t wanted = 0;
    for (int64_t tile = me; tile < to.key_tiles; tile += kScanThreads) {
      const uint32_t pieces = pieces_of(tile, longest);
      if (pieces > 1) wanted += pieces;
    }
    if (add_up(wanted).all <= to.cut_places()) break;
  }

  Piece* const pieces = to.pieces + lineup * to.piece_places();
  Cut* const cuts = to.cuts + lineup * to.cut_places();
  uint64_t before = 0;  // pieces, and in the upper half those of cut lists
  for (int64_t first = 0; first < to.key_tiles; first += kScanThreads) {
    const int64_t tile = first + me;
    const uint32_t count = pieces_of(tile, longest), cut = count > 1 ? count : 0;
    const uint64_t here = count | static_cast<uint64_t>(cut) << 32;
    const tile::Scanned<uint64_t> sums = add_up(here);
    const uint64_t mine = before + sums.here - here;
    before += sums.all;
    const int32_t key_tile = static_cast<int32_t>(lineup % to.lineups * to.key_tiles + tile);
    for (uint32_t i = 0; i < count; ++i) {
      const uint64_t begin = start[tile * to.group], entries = start[(tile + 1) * to.group] - begin,
                     from = begin + entries * i / count, end = begin + entries * (i + 1) / count;
      const int64_t at_cut = static_cast<int64_t>(mine >> 32) + i;
      pieces[static_cast<uint32_t>(mine) + i] = {
          key_tile, static_cast<int32_t>(end - from),
          static_cast<uint32_t>(lineup % to.lineups * to.places + static_cast<int64_t>(end)),
          cut > 0 ? static_cast<int32_t>(lineup * to.cut_places() + at_cut) : -1};
      if (cut > 0) cuts[at_cut] = {key_tile, i == 0 ? static_cast<int32_t>(count) : 0};
    }
  }
  for (int64_t i = static_cast<uint32_t>(before) + me; i < to.piece_places(); i += kScanThreads)
    pieces[i] = {-1, 0, 0, -1};
  if (me == 0) to.cut_count[lineup] = static_cast<uint32_t>(before >> 32);
}

/// Writes the entries of a column in the order of its bits. A warp takes a column.
__global__ void __launch_bounds__(kThreads)
    entries_kernel(const __grid_constant__ QueryListsParams p) {
  const int64_t per_head = p.to.lineups * p.to.columns(), at = warp_index();
  if (at >= p.job.h / p.job.group * per_head) return;
  const int64_t kv_head = at / per_head, key_tile = at % per_head / p.job.group,
                head = kv_head * p.job.group + at % p.job.group;
  const tile::Sequence s = tile::sequence_of_block<kBlock>(
      p.job.seq, static_cast<int>(key_tile * p.job.tile_k / kBlock), false);
  const int64_t origin = p.job.seq.documents == nullptr ? 0 : s.q_pad;  // the query of bit 0
  const uint32_t* const bits = p.to.bits + at * p.to.words();
  ListedQueries* to =
      p.to.entries + at / p.to.columns() * p.to.places + p.to.start[start_of(p.to, at)];
  for (int64_t first = 0; first < p.to.words(); first += 32) {
    const int64_t at_word = first + lane_index();
    uint32_t word = at_word < p.to.words() ? bits[at_word] : 0;
    const int count = __popc(word);
    const int end = tile::scan_warp(count, [](int a, int b) { return a + b; });
    for (int place = end - count; word != 0; ++place, word &= word - 1) {
      const int64_t query =
          (at_word * 32 + __ffs(static_cast<int>(word)) - 1) * kListedQueries - origin;
      to[place] = {static_cast<int32_t>(query),
                   static_cast<uint32_t>(head * p.job.tq + s.q_pad + query)};
    }
    to += __shfl_sync(kAll, end, 31);
  }
}

}  // namespace

void launch_key_lists(const ListJob& job, const KeyLists& to, cudaStream_t stream) {
  launch(key_lists_kernel, grid_of(job.h * (job.tq / job.tile_q)), kThreads, 0,
         KeyListsParams{job, to}, stream);
}

void launch_query_lists(const ListJob& job, const QueryLists& to, cudaStream_t stream) {
  const int64_t lineups = job.h / job.group * to.lineups, columns = to.columns();
  const QueryListsParams params{job, to};
  launch(count_kernel, grid_of(job.h * (job.tq / kListedQueries)), kThreads, 0, params, stream);
  launch(pieces_kernel, dim3(static_cast<unsigned>(lineups)), kScanThreads, 0, params, stream);
  launch(entries_kernel, grid_of(lineups * columns), kThreads, 0, params, stream);
}

}  // namespace sagebwd::cuda
