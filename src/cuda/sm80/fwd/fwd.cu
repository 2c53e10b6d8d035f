// SPDX-License-Identifier: Apache-2.0
// Instances of the forward kernel, and their choice.
#include "cuda/sm80/fwd/fwd.h"
#include "cuda/sm80/fwd/kernel.cuh"

namespace sagebwd::cuda::sm80 {
namespace {

template <typename T>
void run(const ForwardParams& p, int padded_d, int tile_k, int q_blocks, int heads,
         cudaStream_t stream) {
  using fwd::Instance;
  if (tile_k == 64)
    padded_d == 64 ? run_forward<T, Instance::paper_narrow>(p, q_blocks, heads, stream)
                   : run_forward<T, Instance::paper_wide>(p, q_blocks, heads, stream);
  else if (p.k_per_token)
    padded_d == 64 ? run_forward<T, Instance::per_key_narrow>(p, q_blocks, heads, stream)
                   : run_forward<T, Instance::per_key_wide>(p, q_blocks, heads, stream);
  else
    padded_d == 64 ? run_forward<T, Instance::narrow>(p, q_blocks, heads, stream)
                   : run_forward<T, Instance::wide>(p, q_blocks, heads, stream);
}

}  // namespace

void launch_forward(const ForwardParams& p, Dtype dtype, Rounding rounding, int padded_d,
                    int tile_k, int q_blocks, int heads, cudaStream_t stream) {
  if (p.lists.rows != nullptr)
    launch_listed_forward(p, dtype, padded_d, tile_k, q_blocks, heads, stream);
  else if (p.cap.on())
    launch_capped_forward(p, dtype, padded_d, q_blocks, heads, stream);
  else if (rounding == Rounding::dither)
    launch_dithered_forward(p, dtype, padded_d, q_blocks, heads, stream);
  else if (dtype == Dtype::bf16)
    run<__nv_bfloat16>(p, padded_d, tile_k, q_blocks, heads, stream);
  else
    run<__half>(p, padded_d, tile_k, q_blocks, heads, stream);
}

}  // namespace sagebwd::cuda::sm80
