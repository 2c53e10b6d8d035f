// SPDX-License-Identifier: Apache-2.0
// Instances of the fused backward that round the codes of dS for dQ by dither: recipe `vectorwise`.
#include "cuda/sm80/bwd/fused/choose.cuh"
#include "cuda/sm80/bwd/launch.h"

namespace sagebwd::cuda::sm80 {

using fused_backward::Policy;

template <typename T, int D>
void launch_dithered_dq(const BackwardParams& p, int k_blocks, cudaStream_t stream) {
  constexpr Scheme kScheme = Scheme::vectorwise;
  wants_general(p)
      ? fused_backward::run<Policy::general_dither_dq, kScheme, T, D>(p, k_blocks, stream)
      : fused_backward::run<Policy::fast_dither_dq, kScheme, T, D>(p, k_blocks, stream);
}

template void launch_dithered_dq<__nv_bfloat16, 64>(const BackwardParams&, int, cudaStream_t);
template void launch_dithered_dq<__nv_bfloat16, 128>(const BackwardParams&, int, cudaStream_t);
template void launch_dithered_dq<__half, 64>(const BackwardParams&, int, cudaStream_t);
template void launch_dithered_dq<__half, 128>(const BackwardParams&, int, cudaStream_t);

}  // namespace sagebwd::cuda::sm80
