// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <type_traits>

#include "cuda/sla2/linear/rows.cuh"

namespace sagebwd::cuda::sla2::linear {
namespace {

constexpr int kThreads = 256;

/// A warp makes a row; a lane has a word of it. Nobody has checked the lists: what is out of range
/// excludes nothing.
__global__ void __launch_bounds__(kThreads) seen_kernel(const __grid_constant__ SeenJob p) {
  const int lane = static_cast<int>(threadIdx.x % 32);
  const int64_t at = static_cast<int64_t>(blockIdx.x) * (kThreads / 32) + threadIdx.x / 32;
  take_turn();
  if (blockIdx.x == 0)
    for (void* const zeros : p.zeros)
      for (int i = static_cast<int>(threadIdx.x); zeros != nullptr && i < p.zero_words;
           i += kThreads)
        static_cast<uint32_t*>(zeros)[i] = 0;
  if (at >= static_cast<int64_t>(p.heads) * p.rows) return;
  const int64_t head = p.first + at / p.rows;
  const int64_t n =
      head / p.of_batch * p.stride_batch + head % p.of_batch * p.stride_head + at % p.rows;
  int64_t count = 0;
  if (p.index != nullptr)
    count = p.count == nullptr ? p.width : min(static_cast<int64_t>(p.count[n]), p.width);
  for (int64_t first = 0; first < p.words; first += 32) {
    const int64_t word = first + lane, left = p.columns - 32 * word;
    uint32_t bits = left >= 32 ? ~0u : left > 0 ? (1u << left) - 1 : 0u;
    for (int64_t i = 0; i < count; i += 32) {
      const int32_t entry = i + lane < count ? p.index[n * p.width + i + lane] : -1;
#pragma unroll
      for (int j = 0; j < 32; ++j) {
        const int32_t block = __shfl_sync(kAllLanes, entry, j);
        if (block >= 0 && block / 32 == word) bits &= ~(1u << block % 32);
      }
    }
    if (word < p.words) p.by_query[at * p.words + word] = bits;
  }
}

/// A thread makes a word of 32 blocks of queries.
__global__ void __launch_bounds__(kThreads)
    seen_by_keys_kernel(const __grid_constant__ SeenByKeysJob p) {
  take_turn();
  const int64_t at = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x;
  const int64_t column = at % p.columns, word = at / p.columns % p.words,
                head = at / p.columns / p.words;
  if (head >= p.key_heads) return;
  uint32_t bits = 0;
#pragma unroll 8
  for (int i = 0; i < 32; ++i) {
    const int64_t row = 32 * word + i;
    if (row >= p.rows) break;
    const uint32_t seen = p.by_query[(head * p.rows + row) * p.query_words + column / 32];
    bits |= (seen >> column % 32 & 1u) << i;
  }
  p.by_key[(head * p.columns + column) * p.words + word] = bits;
}

}  // namespace

void launch_seen(const Kind& kind, const SeenJob& job) {
  const int64_t warps = static_cast<int64_t>(job.heads) * job.rows, per_block = kThreads / 32;
  const int64_t blocks = std::max<int64_t>(1, (warps + per_block - 1) / per_block);
  launch(seen_kernel, dim3(static_cast<unsigned>(blocks)), kThreads, 0, job, kind.stream,
         kind.start);
}

void launch_seen_by_keys(const Kind& kind, const SeenByKeysJob& job) {
  const int64_t threads = static_cast<int64_t>(job.key_heads) * job.columns * job.words;
  launch(seen_by_keys_kernel, dim3(static_cast<unsigned>((threads + kThreads - 1) / kThreads)),
         kThreads, 0, job, kind.stream, kind.start);
}

}  // namespace sagebwd::cuda::sla2::linear
