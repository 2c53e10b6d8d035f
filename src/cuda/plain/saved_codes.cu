// SPDX-License-Identifier: Apache-2.0
#include "cuda/host/launch.h"
#include "cuda/plain/saved_codes.h"
#include "cuda/plain/token_block.cuh"
#include "sagebwd/codes.h"

namespace sagebwd::cuda::plain {
namespace {

static_assert(kKeysPerScale % kBlock == 0, "the keys of a block share one scale");

/// Where the scale that the keys of a thread block share is saved.
__device__ float& shared_scale(const SavedCodesJob& job, const TokenBlock& b) {
  const tile::Sequence s = tile::sequence_at<kKeysPerScale>(job.scale_blocks, b.s.index);
  return job.k_scale[b.head * job.key_blocks + (s.k_pad + b.first) / kKeysPerScale];
}

__global__ void __launch_bounds__(kTokenThreads) save_kernel(SavedCodesJob job) {
  const TokenBlock b(job.batch, job.queries);
  for (int r = warp(); r < b.rows; r += kTokenWarps) {
    const int64_t at = b.place(job.tokens, r);
    const bool poisoned = job.k_scale != nullptr && isnan(job.x.scale[at]);
    for (int c = lane(); c < job.d; c += 32)
      job.saved[at * job.d + c] =
          poisoned && c == 0 ? kPoisonedCode : job.x.codes[at * job.pitch + c];
  }
  // The first thread block of those that share a scale writes it.
  if (job.k_scale == nullptr || b.first % kKeysPerScale != 0 || warp() != 0) return;
  float scale = 0.0f;  // that of any key which is not poisoned; the maximum drops NaN
  for (int r = lane(); r < min(kKeysPerScale, b.count - b.first); r += 32)
    scale = fmaxf(scale, job.x.scale[b.place(job.tokens, r)]);
  scale = warp_max(scale);
  if (lane() == 0) shared_scale(job, b) = scale;
}

__global__ void __launch_bounds__(kTokenThreads) load_kernel(SavedCodesJob job) {
  const TokenBlock b(job.batch, job.queries);
  for (int r = warp(); r < b.rows; r += kTokenWarps) {
    const int64_t at = b.place(job.tokens, r);
    const int8_t* from = job.saved + at * job.d;
    const bool poisoned = job.k_scale != nullptr && from[0] == kPoisonedCode;
    for (int c = lane(); c < job.pitch; c += 32)
      job.x.codes[at * job.pitch + c] = poisoned || c >= job.d ? int8_t{0} : from[c];
    if (job.k_scale == nullptr || lane() != 0) continue;
    job.x.scale[at] = poisoned ? NAN : shared_scale(job, b);
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
