// SPDX-License-Identifier: Apache-2.0
// A kernel of its own, because a rotation of 256 channels crosses the thread blocks of the
// backward.
#include "cuda/host/launch.h"
#include "cuda/plain/rotate.cuh"
#include "cuda/plain/token_block.cuh"
#include "cuda/plain/turn_back.h"

namespace sagebwd::cuda::plain {
namespace {

__global__ void __launch_bounds__(kTokenThreads) turn_back_kernel(TurnBackJob job) {
  __shared__ float row_of_warp[kTokenWarps][kMaxDim];
  const TokenBlock b(job.batch, job.queries);
  const int64_t kv = static_cast<int64_t>(b.s.index) * (job.heads / job.group) + b.head / job.group;
  const float* mean = job.mean == nullptr ? nullptr : job.mean + kv * job.d;
  float* const row = row_of_warp[warp()];
  for (int r = warp(); r < b.rows; r += kTokenWarps) {
    const int64_t from = b.place(job.tokens, r);
    const int64_t token = (job.queries ? b.s.q_begin : b.s.k_begin) + b.first + r;
    const int64_t to = tile::offset_of(job.to, b.s, b.head, token);
    for (int c = lane(); c < job.d; c += 32) row[c] = job.rows[from * job.d + c];
    rotate_back(row, job.d);
    for (int c = lane(); c < job.d; c += 32) {
      const float value = mean == nullptr ? row[c] : row[c] + job.row_sum[from] * mean[c];
      write(job.batch.dtype, job.to, to + c, job.factor * value);
    }
  }
}

}  // namespace

void launch_turn_back(const TurnBackJob& job, cudaStream_t stream) {
  launch(turn_back_kernel, grid_of(job.batch, job.queries, job.heads), kTokenThreads, 0, job,
         stream);
}

}  // namespace sagebwd::cuda::plain
