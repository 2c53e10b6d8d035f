// SPDX-License-Identifier: Apache-2.0
// Instances of the fused backward that walk block lists: recipe `vectorwise`.
#include "cuda/sm80/bwd/fused/choose.cuh"
#include "cuda/sm80/bwd/launch.h"

namespace sagebwd::cuda::sm80 {

using fused_backward::Policy;

template <typename T, int D>
void launch_listed(const BackwardParams& p, int k_blocks, cudaStream_t stream) {
  wants_general(p)
      ? fused_backward::run<Policy::general_lists, Scheme::vectorwise, T, D>(p, k_blocks, stream)
      : fused_backward::run<Policy::lists, Scheme::vectorwise, T, D>(p, k_blocks, stream);
}

template void launch_listed<__nv_bfloat16, 64>(const BackwardParams&, int, cudaStream_t);
template void launch_listed<__nv_bfloat16, 128>(const BackwardParams&, int, cudaStream_t);
template void launch_listed<__half, 64>(const BackwardParams&, int, cudaStream_t);
template void launch_listed<__half, 128>(const BackwardParams&, int, cudaStream_t);

}  // namespace sagebwd::cuda::sm80
