// SPDX-License-Identifier: Apache-2.0
// Instances of the forward kernel that walk block lists: recipe `vectorwise`.
#include "cuda/sm80/fwd/fwd.h"
#include "cuda/sm80/fwd/kernel.cuh"

namespace sagebwd::cuda::sm80 {
namespace {

template <typename T>
void run(const ForwardParams& p, int padded_d, int tile_k, int q_blocks, int heads,
         cudaStream_t stream) {
  using fwd::Instance;
  if (tile_k == 64)
    padded_d == 64 ? run_forward<T, Instance::listed_narrow_64>(p, q_blocks, heads, stream)
                   : run_forward<T, Instance::listed_wide_64>(p, q_blocks, heads, stream);
  else
    padded_d == 64 ? run_forward<T, Instance::listed_narrow>(p, q_blocks, heads, stream)
                   : run_forward<T, Instance::listed_wide>(p, q_blocks, heads, stream);
}

}  // namespace

void launch_listed_forward(const ForwardParams& p, Dtype dtype, int padded_d, int tile_k,
                           int q_blocks, int heads, cudaStream_t stream) {
  dtype == Dtype::bf16 ? run<__nv_bfloat16>(p, padded_d, tile_k, q_blocks, heads, stream)
                       : run<__half>(p, padded_d, tile_k, q_blocks, heads, stream);
}

}  // namespace sagebwd::cuda::sm80
