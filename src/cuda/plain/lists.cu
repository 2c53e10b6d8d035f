// SPDX-License-Identifier: Apache-2.0
#include "cuda/host/launch.h"
#include "cuda/lists/listed.cuh"
#include "cuda/plain/lists.h"
#include "cuda/plain/params.h"

namespace sagebwd::cuda::plain {
namespace {

struct ListBitsParams {
  ListJob job;
  ListBits to;
};

/// A warp makes a row.
__global__ void __launch_bounds__(lists::kThreads)
    list_bits_kernel(const __grid_constant__ ListBitsParams p) {
  const int64_t per_head = p.job.tq / kBlock, at = lists::warp_index();
  if (at >= p.job.h * per_head) return;
  lists::Listed<kBlock> row(p.job, static_cast<int>(at / per_head), at % per_head);
  row.seen = {0, row.s.nk};
  const int64_t lead_items = p.job.lead < 0 ? row.items : int64_t{p.job.lead} * row.per_block;
  for (int64_t item = lists::lane_index(); item < row.items; item += 32) {
    const int tile = row.tile(p.job, item);
    if (tile < 0) continue;
    const int64_t bit = row.s.k_pad / kBlock + tile, word = at * p.to.words + bit / 32;
    atomicOr(p.to.listed + word, 1u << (bit % 32));
    if (item < lead_items) atomicOr(p.to.leading + word, 1u << (bit % 32));
  }
}

}  // namespace

void launch_list_bits(const ListJob& job, const ListBits& to, cudaStream_t stream) {
  const int64_t rows = job.h * (job.tq / kBlock);
  const size_t bytes = static_cast<size_t>(rows * to.words) * sizeof(uint32_t);
  if (bytes == 0) return;
  SAGE_CUDA(cudaMemsetAsync(to.listed, 0, bytes, stream));
  SAGE_CUDA(cudaMemsetAsync(to.leading, 0, bytes, stream));
  launch(list_bits_kernel, lists::grid_of(rows), lists::kThreads, 0, ListBitsParams{job, to},
         stream);
}

}  // namespace sagebwd::cuda::plain
