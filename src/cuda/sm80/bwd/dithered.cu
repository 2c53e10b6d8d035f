// SPDX-License-Identifier: Apache-2.0
// Instances of the backward kernels that round by dither: recipe `paper`.
#include "cuda/sm80/bwd/key_block.cuh"
#include "cuda/sm80/bwd/query_block.cuh"

namespace sagebwd::cuda::sm80 {

template <typename T, int D>
void launch_dithered(const BackwardParams& p, int q_blocks, int k_blocks, cudaStream_t stream) {
  run_key_blocks<T, D, true, Rounding::dither>(p, k_blocks, stream);
  run_query_blocks<T, D, true, Rounding::dither>(p, q_blocks, stream);
}

template void launch_dithered<__nv_bfloat16, 64>(const BackwardParams&, int, int, cudaStream_t);
template void launch_dithered<__nv_bfloat16, 128>(const BackwardParams&, int, int, cudaStream_t);
template void launch_dithered<__half, 64>(const BackwardParams&, int, int, cudaStream_t);
template void launch_dithered<__half, 128>(const BackwardParams&, int, int, cudaStream_t);

}  // namespace sagebwd::cuda::sm80
