// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <cmath>

#include "cuda/host/documents.h"
#include "cuda/host/launch.h"
#include "cuda/tile/scan.cuh"

namespace sagebwd::cuda {
namespace {

/// Entries that one launch passes by value.
constexpr int kDocumentsPerLaunch = 240;
struct DocumentChunk {
  DocumentStart start[kDocumentsPerLaunch];
  DocumentStart* to;
  int count;
};

__global__ void document_kernel(const __grid_constant__ DocumentChunk p) {
  if (static_cast<int>(threadIdx.x) < p.count) p.to[threadIdx.x] = p.start[threadIdx.x];
}

/// Makes the table from offsets on the device.
struct DocumentTableJob {
  const int32_t *cu_q, *cu_k;  // [count + 1]
  int count;
  int64_t nq, nk;     // tokens of the tensors
  DocumentStart* to;  // [count + 1]
  int block;          // tokens of a block
};

constexpr int kTableThreads = 1024;

/// One thread per document, kTableThreads documents at a time.
__global__ void __launch_bounds__(kTableThreads)
    document_table_kernel(const __grid_constant__ DocumentTableJob job) {
  __shared__ int shared[kTableThreads / 32];
  __shared__ int before[2][kTableThreads];
  const int thread = static_cast<int>(threadIdx.x);
  const auto inside = [](int x, int64_t total) {
    return x < 0 ? 0 : x > total ? static_cast<int>(total) : x;
  };
  const auto larger = [](int a, int b) { return a > b ? a : b; };
  const auto sum = [](int a, int b) { return a + b; };
  const int32_t* const cu[2] = {job.cu_q, job.cu_k};
  const int64_t total[2] = {job.nq, job.nk};
  int start[2] = {inside(cu[0][0], total[0]), inside(cu[1][0], total[1])}, block[2] = {0, 0};
  for (int base = 0; base < job.count; base += kTableThreads) {
    const int t = base + thread;
    DocumentStart entry{};
#pragma unroll
    for (int side = 0; side < 2; ++side) {
      // Threads after the last document add nothing.
      const int end = t < job.count ? inside(cu[side][t + 1], total[side]) : 0;
      const tile::Scanned<int> ends = tile::scan_block(larger(end, start[side]), shared, larger);
      before[side][thread] = ends.here;
      __syncthreads();
      const int first = thread == 0 ? start[side] : before[side][thread - 1];
      const int blocks = (ends.here - first + job.block - 1) / job.block;
      const tile::Scanned<int> sums = tile::scan_block(blocks, shared, sum);
      (side == 0 ? entry.q : entry.k) = first;
      (side == 0 ? entry.q_block : entry.k_block) = block[side] + sums.here - blocks;
      start[side] = ends.all, block[side] += sums.all;
    }
    if (t < job.count) job.to[t] = entry;
  }
  if (thread == 0) job.to[job.count] = {start[0], start[1], block[0], block[1]};
}

constexpr int kUncoveredThreads = 256, kUncoveredBlocks = 256;

/// A warp writes a row.
__global__ void __launch_bounds__(kUncoveredThreads)
    uncovered_kernel(const __grid_constant__ UncoveredJob job) {
  const DocumentStart first = job.documents[0], last = job.documents[job.count];
  const int lane = static_cast<int>(threadIdx.x) % 32;
  const int64_t warp = (static_cast<int64_t>(blockIdx.x) * kUncoveredThreads + threadIdx.x) / 32;
  constexpr int64_t kWarps = kUncoveredBlocks * kUncoveredThreads / 32;
#pragma unroll
  for (int i = 0; i < 3; ++i) {
    const UncoveredJob::Rows& r = job.rows[i];
    if (r.x.data == nullptr) continue;
    const int64_t begin = r.queries ? first.q : first.k, end = r.queries ? last.q : last.k;
    const int64_t count = begin + r.tokens - end;
    for (int64_t row = warp; row < count * r.heads; row += kWarps) {
      const int64_t head = row / count, at = row % count,
                    token = at < begin ? at : at - begin + end;
      uint16_t* x = static_cast<uint16_t*>(r.x.data) + head * r.x.head + token * r.x.token;
      for (int c = lane; c < job.d; c += 32) x[c] = 0;
      if (i == 0 && lane == 0 && job.lse.data != nullptr)
        job.lse.data[head * job.lse.head + token * job.lse.token] = -INFINITY;
    }
  }
}

}  // namespace

void write_documents(const spec::Problem& p, const Blocks& blocks, DocumentStart* to,
                     cudaStream_t stream) {
  if (!p.packed()) return;
  if (p.documents.on_device) {
    const DocumentTableJob job{.cu_q = p.documents.cu_q,
                               .cu_k = p.documents.cu_k,
                               .count = static_cast<int>(p.documents.count),
                               .nq = p.nq,
                               .nk = p.nk,
                               .to = to,
                               .block = blocks.tokens};
    launch(document_table_kernel, dim3(1), kTableThreads, 0, job, stream);
    return;
  }
  const int total = static_cast<int>(blocks.documents.size());
  for (int first = 0; first < total; first += kDocumentsPerLaunch) {
    DocumentChunk chunk{};
    chunk.to = to + first;
    chunk.count = std::min(kDocumentsPerLaunch, total - first);
    std::copy_n(blocks.documents.begin() + first, chunk.count, chunk.start);
    launch(document_kernel, dim3(1), 256, 0, chunk, stream);
  }
}

void launch_uncovered(const UncoveredJob& job, cudaStream_t stream) {
  launch(uncovered_kernel, dim3(kUncoveredBlocks), kUncoveredThreads, 0, job, stream);
}

}  // namespace sagebwd::cuda
