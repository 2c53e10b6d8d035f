// SPDX-License-Identifier: Apache-2.0
// Instances of the fused backward that cap logits: recipe `vectorwise`. Rows of their dS sum to
// nothing that is known, so all add those sums up.
#include "cuda/sm80/bwd/fused/choose.cuh"
#include "cuda/sm80/bwd/launch.h"

namespace sagebwd::cuda::sm80 {

template <typename T, int D>
void launch_capped(const BackwardParams& p, int k_blocks, cudaStream_t stream) {
  fused_backward::run<fused_backward::Policy::general_capped, Scheme::vectorwise, T, D>(p, k_blocks,
                                                                                        stream);
}

template void launch_capped<__nv_bfloat16, 64>(const BackwardParams&, int, cudaStream_t);
template void launch_capped<__nv_bfloat16, 128>(const BackwardParams&, int, cudaStream_t);
template void launch_capped<__half, 64>(const BackwardParams&, int, cudaStream_t);
template void launch_capped<__half, 128>(const BackwardParams&, int, cudaStream_t);

}  // namespace sagebwd::cuda::sm80
