// SPDX-License-Identifier: Apache-2.0
// Before the operand kernel, in one launch: zeroes what has to be zero, and writes the table of
// pieces of work.
#include <algorithm>

#include "cuda/arch/kernel_order.cuh"
#include "cuda/host/launch.h"
#include "cuda/tuned/items.cuh"

namespace sagebwd::cuda::tuned {
namespace {

constexpr int kThreads = 256, kMostBlocks = 256;

struct PrepareJob {
  OperandJob operands;
  int64_t count;  // of pieces of work
};

__global__ void __launch_bounds__(kThreads) prepare_kernel(const __grid_constant__ PrepareJob job) {
  arch::let_next_kernel_start();
  const int64_t first = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x,
                step = static_cast<int64_t>(gridDim.x) * kThreads;
  for (const Zeros::Piece& piece : job.operands.zeros.piece)
    for (int64_t i = first; i < piece.words; i += step) piece.at[i] = 0;
  for (int64_t i = first; i <= job.count; i += step)
    job.operands.items[i] = item_at(job.operands, static_cast<uint32_t>(i));
}

}  // namespace

int64_t launch_prepare(OperandJob& job, int64_t ahead, cudaStream_t stream) {
  const Counts n(job);
  const int each = n.means + n.codes;
  job.lead =
      static_cast<int>(std::min(each > 0 ? (ahead + each - 1) / each : int64_t{0}, n.portions));
  job.by_pieces = Divisor(each), job.by_means = Divisor(n.means), job.by_codes = Divisor(n.codes);
  job.by_hk = Divisor(job.hk), job.by_q_blocks = Divisor(n.q_blocks);
  job.q_blocks_each = Divisor(job.seq.q_blocks), job.k_blocks_each = Divisor(job.seq.k_blocks);
  const int64_t count = n.all();
  job.last_item = static_cast<uint32_t>(count);
  int64_t most = count + 1;
  for (const Zeros::Piece& piece : job.zeros.piece) most = std::max(most, piece.words);
  const int64_t blocks = std::min<int64_t>((most + kThreads - 1) / kThreads, kMostBlocks);
  launch(prepare_kernel, dim3(static_cast<unsigned>(blocks)), kThreads, 0, PrepareJob{job, count},
         stream);
  return count;
}

}  // namespace sagebwd::cuda::tuned
