// SPDX-License-Identifier: Apache-2.0
// Which kernels make a backward.
#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include "cuda/host/launch.h"
#include "cuda/sm80/bwd/bwd.h"
#include "cuda/sm80/bwd/launch.h"

namespace sagebwd::cuda::sm80 {
namespace {

template <typename T, int D>
void run(const BackwardParams& p, Scheme scheme, uint32_t dithered, int q_blocks, int k_blocks,
         cudaStream_t stream) {
  if (p.lists.entries != nullptr) {
    launch_listed<T, D>(p, k_blocks, stream);
    launch_piece_sums<T, D>(p, stream);
  } else if (p.cap.on()) {
    launch_capped<T, D>(p, k_blocks, stream);
  } else if (dithered != 0) {
    scheme == Scheme::paper ? launch_dithered<T, D>(p, k_blocks, stream)
                            : launch_dithered_dq<T, D>(p, k_blocks, stream);
  } else if (wants_general(p)) {
    launch_general<T, D>(p, scheme, k_blocks, stream);
  } else {
    launch_fast<T, D>(p, scheme, k_blocks, stream);
  }
  launch_query_sums<T, D>(p, q_blocks, stream);
}

}  // namespace

void launch_backward(const BackwardParams& p, Dtype dtype, Scheme scheme, uint32_t dithered,
                     int padded_d, int q_blocks, int k_blocks, cudaStream_t stream) {
  if (dtype == Dtype::bf16)
    padded_d == 64 ? run<__nv_bfloat16, 64>(p, scheme, dithered, q_blocks, k_blocks, stream)
                   : run<__nv_bfloat16, 128>(p, scheme, dithered, q_blocks, k_blocks, stream);
  else
    padded_d == 64 ? run<__half, 64>(p, scheme, dithered, q_blocks, k_blocks, stream)
                   : run<__half, 128>(p, scheme, dithered, q_blocks, k_blocks, stream);
}

}  // namespace sagebwd::cuda::sm80
