// SPDX-License-Identifier: Apache-2.0
#include "cuda/host/launch.h"
#include "cuda/plain/saved_codes.h"
#include "cuda/plain/token_block.cuh"

namespace sagebwd::cuda::plain {
namespace {

__global__ void __launch_bounds__(kTokenThreads) save_kernel(SavedCodesJob job) {
  const TokenBlock b(job.batch, job.queries);
  for (int r = warp(); r < b.rows; r += kTokenWarps) {
    const int64_t at = b.place(job.tokens, r);
    for (int c = lane(); c < job.d; c += 32)
      job.saved[at * job.d + c] = job.codes[at * job.pitch + c];
  }
}

__global__ void __launch_bounds__(kTokenThreads) load_kernel(SavedCodesJob job) {
  const TokenBlock b(job.batch, job.queries);
  for (int r = warp(); r < b.rows; r += kTokenWarps) {
    const int64_t at = b.place(job.tokens, r);
    for (int c = lane(); c < job.pitch; c += 32)
      job.codes[at * job.pitch + c] = c < job.d ? job.saved[at * job.d + c] : int8_t{0};
  }
}

}  // namespace

void launch_save(const SavedCodesJob& job, cudaStream_t stream) {
  launch(save_kernel, grid_of(job.batch, job.queries, job.heads), kTokenThreads, 0, job, stream);
}

void launch_load(const SavedCodesJob& job, cudaStream_t stream) {
  launch(load_kernel, grid_of(job.batch, job.queries, job.heads), kTokenThreads, 0, job, stream);
}

}  // namespace sagebwd::cuda::plain
