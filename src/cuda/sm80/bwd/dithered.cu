// SPDX-License-Identifier: Apache-2.0
// Instances of the fused backward that round by dither: recipe `paper`.
#include "cuda/sm80/bwd/fused/choose.cuh"
#include "cuda/sm80/bwd/launch.h"

namespace sagebwd::cuda::sm80 {

template <typename T, int D>
void launch_dithered(const BackwardParams& p, int k_blocks, cudaStream_t stream) {
  fused_backward::run<fused_backward::Policy::dither, Scheme::paper, T, D>(p, k_blocks, stream);
}

template void launch_dithered<__nv_bfloat16, 64>(const BackwardParams&, int, cudaStream_t);
template void launch_dithered<__nv_bfloat16, 128>(const BackwardParams&, int, cudaStream_t);
template void launch_dithered<__half, 64>(const BackwardParams&, int, cudaStream_t);
template void launch_dithered<__half, 128>(const BackwardParams&, int, cudaStream_t);

}  // namespace sagebwd::cuda::sm80
