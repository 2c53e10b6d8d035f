// SPDX-License-Identifier: Apache-2.0
// Instances of the forward kernel that cap logits: recipe `vectorwise`.
#include "cuda/sm80/fwd/fwd.h"
#include "cuda/sm80/fwd/kernel.cuh"

namespace sagebwd::cuda::sm80 {
namespace {

template <typename T>
void run(const ForwardParams& p, int padded_d, int q_blocks, int heads, cudaStream_t stream) {
  using fwd::Instance;
  padded_d == 64 ? run_forward<T, Instance::capped_narrow>(p, q_blocks, heads, stream)
                 : run_forward<T, Instance::capped_wide>(p, q_blocks, heads, stream);
}

}  // namespace

void launch_capped_forward(const ForwardParams& p, Dtype dtype, int padded_d, int q_blocks,
                           int heads, cudaStream_t stream) {
  dtype == Dtype::bf16 ? run<__nv_bfloat16>(p, padded_d, q_blocks, heads, stream)
                       : run<__half>(p, padded_d, q_blocks, heads, stream);
}

}  // namespace sagebwd::cuda::sm80
