// SPDX-License-Identifier: Apache-2.0
// Zeroes what has to be zero before the operand kernel: small pieces of memory, in one launch.
#include <algorithm>

#include "cuda/arch/kernel_order.cuh"
#include "cuda/host/launch.h"
#include "cuda/quantize/quantize.h"

namespace sagebwd::cuda {
namespace {

constexpr int kThreads = 256, kMostBlocks = 256;

__global__ void __launch_bounds__(kThreads) zeros_kernel(const __grid_constant__ ZerosJob job) {
  arch::let_next_kernel_start();
  const int64_t first = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x,
                step = static_cast<int64_t>(gridDim.x) * kThreads;
  for (const ZerosJob::Piece& piece : job.piece)
    for (int64_t i = first; i < piece.words; i += step) piece.at[i] = 0;
}

}  // namespace

void launch_zeros(const ZerosJob& job, cudaStream_t stream) {
  int64_t most = 0;
  for (const ZerosJob::Piece& piece : job.piece) most = std::max(most, piece.words);
  const int64_t blocks = std::min<int64_t>((most + kThreads - 1) / kThreads, kMostBlocks);
  launch(zeros_kernel, dim3(static_cast<unsigned>(blocks)), kThreads, 0, job, stream);
}

}  // namespace sagebwd::cuda
