// SPDX-License-Identifier: Apache-2.0
#include "cuda/arch/kernel_order.cuh"
#include "cuda/host/launch.h"
#include "cuda/host/target.h"
#include "cuda/sla2/mix/eight.cuh"

namespace sagebwd::cuda::sla2::mix {
namespace {

constexpr int kTogether = 4;  // rows that a thread has under way

int64_t items_of(const MeansJob& p, int i) {
  return static_cast<int64_t>(p.batches) * p.of[i].heads * p.of[i].blocks;
}

}  // namespace

/// A thread block has a block of tokens.
template <typename T, int kLanes>
__global__ void __launch_bounds__(kThreads) block_means_kernel(const __grid_constant__ MeansJob p) {
  constexpr int kRows = kThreads / kLanes;
  __shared__ float sums[kRows][kLanes * 8];
  arch::let_next_kernel_start();
  const int queries = p.batches * p.of[0].heads * p.of[0].blocks;
  const bool of_keys = static_cast<int>(blockIdx.x) >= queries;
  const MeansJob::Of& of = p.of[of_keys];
  const int at = static_cast<int>(blockIdx.x) - (of_keys ? queries : 0);
  const int thread = static_cast<int>(threadIdx.x), channel = thread % kLanes * 8,
            row = thread / kLanes;
  // Heads come before blocks, so that neighbours in memory are worked on together.
  const int head = at % of.heads, block = at / of.heads % of.blocks,
            batch = at / of.heads / of.blocks;
  const int first = block * of.block, size = min(of.block, of.tokens - first);
  const T* const from = row_of<const T>(of.x, batch, head, first) + channel;
  float sum[8] = {};
  for (int token = row; token < size; token += kTogether * kRows) {
    Eight<T> x[kTogether];
#pragma unroll
    for (int i = 0; i < kTogether; ++i) {
      x[i].clear();
      if (token + i * kRows < size && channel < p.d)
        x[i].load(from + (token + i * kRows) * of.x.token, of.x.vector);
    }
#pragma unroll
    for (int i = 0; i < kTogether; ++i)
#pragma unroll
      for (int c = 0; c < 8; ++c) sum[c] += x[i].get(c);
  }
#pragma unroll
  for (int c = 0; c < 8; ++c) sums[row][channel + c] = sum[c];
  __syncthreads();
  if (thread >= p.d) return;
  float total = 0.0f;
#pragma unroll
  for (int r = 0; r < kRows; ++r) total += sums[r][thread];
  of.means[((static_cast<int64_t>(batch) * of.heads + head) * of.blocks + block) * p.d + thread] =
      total / static_cast<float>(size);
}

namespace {

constexpr int kCentreThreads = 1024, kCentreParts = 8;  // thread blocks of a head

}  // namespace

/// Every thread block of a head makes the mean of the sequence, and subtracts it from some blocks.
__global__ void __launch_bounds__(kCentreThreads)
    centre_kernel(const __grid_constant__ CentreJob p) {
  __shared__ float sums[kCentreThreads];
  arch::wait_for_earlier_kernels();
  const int ways = kCentreThreads / p.d, thread = static_cast<int>(threadIdx.x);
  const int channel = thread % p.d, way = thread / p.d;
  const int64_t base = static_cast<int64_t>(blockIdx.y) * p.blocks * p.d + channel;
  const bool works = way < ways;
  const int short_by = p.blocks * p.block - p.tokens;  // tokens that the last block lacks
  float sum = 0.0f;
  if (works) {
#pragma unroll 8
    for (int i = way; i < p.blocks; i += ways)
      sum += p.from[base + static_cast<int64_t>(i) * p.d] *
             static_cast<float>(i == p.blocks - 1 ? p.block - short_by : p.block);
  }
  sums[thread] = sum;
  __syncthreads();
  if (!works) return;
  float mean = 0.0f;
  for (int w = 0; w < ways; ++w) mean += sums[w * p.d + channel];
  mean /= static_cast<float>(p.tokens);
  for (int i = static_cast<int>(blockIdx.x) * ways + way; i < p.blocks; i += kCentreParts * ways) {
    const int64_t at = base + static_cast<int64_t>(i) * p.d;
    p.to[at] = p.from[at] - mean;
  }
}

void launch_means(const Kind& kind, const MeansJob& job) {
  dispatch(kind, [&](auto type, auto lanes) {
    launch(block_means_kernel<decltype(type), lanes()>,
           dim3(static_cast<unsigned>(items_of(job, 0) + items_of(job, 1))), kThreads, 0, job,
           kind.stream);
  });
}

void launch_centre(const CentreJob& job, cudaStream_t stream) {
  if (job.blocks == 0) return;
  launch(centre_kernel, dim3(kCentreParts, static_cast<unsigned>(job.heads)), kCentreThreads, 0,
         job, stream, can_start_early() ? Start::early : Start::behind);
}

}  // namespace sagebwd::cuda::sla2::mix
