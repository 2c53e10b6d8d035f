// SPDX-License-Identifier: Apache-2.0
#include "cuda/host/launch.h"
#include "cuda/lists/listed.cuh"
#include "cuda/lists/lists.h"
#include "cuda/tile/layout.h"

namespace sagebwd::cuda {
namespace {

using namespace lists;

constexpr int kScanThreads = 1024;

struct KeyListsParams {
  ListJob job;
  KeyLists to;
};

/// A warp makes a row. A block that stands in a list twice counts where it stands first.
__global__ void __launch_bounds__(kThreads)
    key_lists_kernel(const __grid_constant__ KeyListsParams p) {
  const int64_t per_head = p.job.tq / kListedQueries, at = warp_index();
  if (at >= p.job.h * per_head) return;
  const Listed<kBlock> row(p.job, static_cast<int>(at / per_head), at % per_head);
  const int64_t lead_items = p.job.lead < 0 ? row.items : int64_t{p.job.lead} * row.per_block;
  int32_t* const tiles = p.to.tiles + at * p.to.width;
  uint32_t* const bits = p.to.bits + at * p.to.words();
  for (int64_t word = lane_index(); word < p.to.words(); word += 32) bits[word] = 0;
  __syncwarp();
  const uint32_t before_me = (1u << lane_index()) - 1;
  int steps = 0, leading = 0;
  for (int64_t first = 0; first < row.items; first += 32) {
    const int64_t item = first + lane_index();
    const int tile = row.tile(p.job, item);
    const uint32_t same = __match_any_sync(kAll, tile);
    bool is_new = tile >= 0 && (same & before_me) == 0;
    if (is_new) {
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
    const int64_t column = (row.s.k_pad / p.job.tile_k + tile) * p.job.group + head % p.job.group;
    const uint32_t mask = 1u << (bit % 32);
    const uint32_t before =
        atomicOr(p.to.bits + (kv_head * p.to.columns() + column) * p.to.words() + bit / 32, mask);
    // A block that stands in a row twice counts once.
    if ((before & mask) == 0) atomicAdd(p.to.start + kv_head * (p.to.columns() + 1) + column, 1u);
    if (p.to.row_bits == nullptr) continue;
    const int64_t key_tile =
        tile + (p.job.seq.documents == nullptr ? 0 : row.s.k_pad / p.job.tile_k);
    atomicOr(p.to.row_bits + at * p.to.row_words() + key_tile / 32, 1u << (key_tile % 32));
  }
}

/// Makes starts of the counts of a key head.
__global__ void __launch_bounds__(kScanThreads)
    start_kernel(const __grid_constant__ QueryListsParams p) {
  __shared__ uint32_t shared[kScanThreads / 32];
  const int64_t columns = p.to.columns();
  uint32_t* const start = p.to.start + blockIdx.x * (columns + 1);
  uint32_t total = 0;
  for (int64_t first = 0; first < columns; first += kScanThreads) {
    const int64_t column = first + threadIdx.x;
    const uint32_t count = column < columns ? start[column] : 0;
    const tile::Scanned<uint32_t> sums =
        tile::scan_block(count, shared, [](uint32_t a, uint32_t b) { return a + b; });
    if (column < columns) start[column] = total + sums.here - count;
    total += sums.all;
  }
  if (threadIdx.x == 0) start[columns] = total;
}

/// Writes the entries of a column in the order of its bits. A warp takes a column.
__global__ void __launch_bounds__(kThreads)
    entries_kernel(const __grid_constant__ QueryListsParams p) {
  const int64_t columns = p.to.columns(), at = warp_index();
  if (at >= p.job.h / p.job.group * columns) return;
  const int64_t kv_head = at / columns, column = at % columns, key_tile = column / p.job.group,
                head = kv_head * p.job.group + column % p.job.group;
  const tile::Sequence s = tile::sequence_of_block<kBlock>(
      p.job.seq, static_cast<int>(key_tile * p.job.tile_k / kBlock), false);
  const int64_t origin = p.job.seq.documents == nullptr ? 0 : s.q_pad;  // the query of bit 0
  const uint32_t* const bits = p.to.bits + at * p.to.words();
  ListedQueries* to =
      p.to.entries + kv_head * p.to.places + p.to.start[kv_head * (columns + 1) + column];
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

/// Starts setting words to zero.
void zero(uint32_t* words, int64_t count, cudaStream_t stream) {
  if (count > 0)
    SAGE_CUDA(cudaMemsetAsync(words, 0, static_cast<size_t>(count) * sizeof(uint32_t), stream));
}

}  // namespace

void launch_key_lists(const ListJob& job, const KeyLists& to, cudaStream_t stream) {
  launch(key_lists_kernel, grid_of(job.h * (job.tq / kListedQueries)), kThreads, 0,
         KeyListsParams{job, to}, stream);
}

void launch_query_lists(const ListJob& job, const QueryLists& to, cudaStream_t stream) {
  const int64_t key_heads = job.h / job.group, columns = to.columns();
  zero(to.bits, key_heads * columns * to.words(), stream);
  zero(to.start, key_heads * (columns + 1), stream);
  if (to.row_bits != nullptr)
    zero(to.row_bits, job.h * (job.tq / kListedQueries) * to.row_words(), stream);
  const QueryListsParams params{job, to};
  launch(count_kernel, grid_of(job.h * (job.tq / kListedQueries)), kThreads, 0, params, stream);
  launch(start_kernel, dim3(static_cast<unsigned>(key_heads)), kScanThreads, 0, params, stream);
  launch(entries_kernel, grid_of(key_heads * columns), kThreads, 0, params, stream);
}

}  // namespace sagebwd::cuda
