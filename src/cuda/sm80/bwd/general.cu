// SPDX-License-Identifier: Apache-2.0
// Instances of the fused backward for deterministic calls and for `partial_kv`.
#include "cuda/sm80/bwd/fused/choose.cuh"
#include "cuda/sm80/bwd/launch.h"

namespace sagebwd::cuda::sm80 {

using fused_backward::Policy;

template <typename T, int D>
void launch_general(const BackwardParams& p, Scheme scheme, int k_blocks, cudaStream_t stream) {
  scheme == Scheme::paper
      ? fused_backward::run<Policy::general, Scheme::paper, T, D>(p, k_blocks, stream)
      : fused_backward::run<Policy::general, Scheme::vectorwise, T, D>(p, k_blocks, stream);
}

template void launch_general<__nv_bfloat16, 64>(const BackwardParams&, Scheme, int, cudaStream_t);
template void launch_general<__nv_bfloat16, 128>(const BackwardParams&, Scheme, int, cudaStream_t);
template void launch_general<__half, 64>(const BackwardParams&, Scheme, int, cudaStream_t);
template void launch_general<__half, 128>(const BackwardParams&, Scheme, int, cudaStream_t);

}  // namespace sagebwd::cuda::sm80
