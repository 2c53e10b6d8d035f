// SPDX-License-Identifier: Apache-2.0
#include "cuda/host/launch.h"
#include "cuda/linear/jobs.h"

namespace sagebwd::cuda::linear {
namespace {

constexpr int kThreads = 256;
constexpr uint32_t kOnes = 0x3f803f80u;  // two BF16 numbers

/// A warp makes a row. Nobody has checked the lists: what is out of range excludes nothing.
__global__ void __launch_bounds__(kThreads) seen_kernel(const __grid_constant__ SeenJob p) {
  const int lane = static_cast<int>(threadIdx.x % 32);
  const int64_t at = static_cast<int64_t>(blockIdx.x) * (kThreads / 32) + threadIdx.x / 32;
  if (at >= static_cast<int64_t>(p.heads) * p.to.rows) return;
  uint16_t* const row = p.to.at + at * p.to.stride;
  for (int64_t pair = lane; 2 * pair < p.to.stride; pair += 32) {
    const int64_t left = p.to.columns - 2 * pair;
    reinterpret_cast<uint32_t*>(row)[pair] = left > 1 ? kOnes : left == 1 ? kOnes & 0xffffu : 0u;
  }
  if (p.index == nullptr) return;
  __syncwarp();
  const int64_t head = p.first + at / p.to.rows;
  const int64_t n =
      head / p.of_batch * p.stride_batch + head % p.of_batch * p.stride_head + at % p.to.rows;
  const int64_t count =
      p.count == nullptr ? p.width : min(static_cast<int64_t>(p.count[n]), p.width);
  for (int64_t i = lane; i < count; i += 32) {
    const int32_t block = p.index[n * p.width + i];
    if (block >= 0 && block < p.to.columns) row[block] = 0;
  }
}

}  // namespace

void launch_seen(const SeenJob& job, cudaStream_t stream) {
  const int64_t warps = static_cast<int64_t>(job.heads) * job.to.rows, per_block = kThreads / 32;
  launch(seen_kernel, dim3(static_cast<unsigned>((warps + per_block - 1) / per_block)), kThreads, 0,
         job, stream);
}

}  // namespace sagebwd::cuda::linear
