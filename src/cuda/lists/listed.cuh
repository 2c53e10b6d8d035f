// SPDX-License-Identifier: Apache-2.0
// A row of the caller's block lists, as a warp reads it.
#pragma once

#include <cstdint>

#include "cuda/lists/lists.h"
#include "cuda/tile/scan.cuh"
#include "cuda/tile/sequence.cuh"
#include "cuda/tile/walk.cuh"

namespace sagebwd::cuda::lists {

inline constexpr uint32_t kAll = 0xffffffffu;
inline constexpr int kThreads = 256;  // a warp takes a row or a column

__device__ inline int lane_index() { return static_cast<int>(threadIdx.x % 32); }
__device__ inline int64_t warp_index() {
  return static_cast<int64_t>(blockIdx.x) * (kThreads / 32) + threadIdx.x / 32;
}
inline dim3 grid_of(int64_t warps) {
  return dim3(static_cast<unsigned>((warps + kThreads / 32 - 1) / (kThreads / 32)));
}

/// The row of a sequence's first queries within its set. The whole warp comes here.
__device__ inline int64_t first_row(const ListJob& job, const tile::Sequence& s) {
  if (job.seq.documents == nullptr) return 0;
  int64_t rows = 0;
  for (int t = lane_index(); t < s.index; t += 32) {
    const int nq = job.seq.documents[t + 1].q - job.seq.documents[t].q;
    rows += (nq + job.block_q - 1) / job.block_q;
  }
  return __shfl_sync(kAll, tile::scan_warp(rows, [](int64_t a, int64_t b) { return a + b; }), 31);
}

/// A tile of queries of one head and its list. kTokens: of a block of the workspace.
template <int kTokens>
struct Listed {
  tile::Sequence s;
  int q0;                // its first query, inside the sequence
  const int32_t* index;  // of the row
  int64_t items;         // tiles of keys that the row names
  int per_block;         // tiles of a block
  int blocks;            // of the sequence's keys
  tile::Range seen;      // keys that one of the queries sees

  /// The whole warp comes here. `query_tile`: in the workspace.
  __device__ Listed(const ListJob& job, int head, int64_t query_tile) {
    const int64_t token = query_tile * job.tile_q;
    s = tile::sequence_of_block<kTokens>(job.seq, static_cast<int>(token / kTokens), true);
    q0 = static_cast<int>(token - s.q_pad);
    per_block = job.block_k / job.tile_k;
    blocks = (s.nk + job.block_k - 1) / job.block_k;
    index = nullptr, items = 0, seen = {0, 0};
    const int64_t row = first_row(job, s) + q0 / job.block_q;
    if (q0 >= s.nq || row >= job.rows) return;  // padding, or documents that are not as they should
    seen = tile::keys_seen(job.mask, s, q0, min(q0 + job.tile_q, s.nq) - 1);
    const int64_t n = s.batch * job.stride_batch + head * job.stride_head + row;
    int64_t count = job.count != nullptr ? job.count[n] : job.width;
    count = count < 0 ? 0 : count > job.width ? job.width : count;
    index = job.index + n * job.width, items = count * per_block;
  }

  /// The tile of keys of an item; negative if there is none, or nothing in it is seen.
  __device__ int tile(const ListJob& job, int64_t item) const {
    if (item >= items) return -1;
    const int block = index[item / per_block];
    if (block < 0 || block >= blocks) return -1;
    const int at = block * per_block + static_cast<int>(item % per_block);
    const int64_t first = static_cast<int64_t>(at) * job.tile_k;
    return first < seen.end && first + job.tile_k > seen.begin ? at : -1;
  }
};

}  // namespace sagebwd::cuda::lists
