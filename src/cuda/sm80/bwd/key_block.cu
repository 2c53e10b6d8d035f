// SPDX-License-Identifier: Apache-2.0
// Instances of the dK, dV kernel.
#include "cuda/sm80/bwd/key_block.cuh"

namespace sagebwd::cuda::sm80 {

template <typename T, int D>
void launch_key_blocks(const BackwardParams& p, bool paper, int k_blocks, cudaStream_t stream) {
  paper ? run_key_blocks<T, D, true, Rounding::nearest>(p, k_blocks, stream)
        : run_key_blocks<T, D, false, Rounding::nearest>(p, k_blocks, stream);
}

template void launch_key_blocks<__nv_bfloat16, 64>(const BackwardParams&, bool, int, cudaStream_t);
template void launch_key_blocks<__nv_bfloat16, 128>(const BackwardParams&, bool, int, cudaStream_t);
template void launch_key_blocks<__half, 64>(const BackwardParams&, bool, int, cudaStream_t);
template void launch_key_blocks<__half, 128>(const BackwardParams&, bool, int, cudaStream_t);

}  // namespace sagebwd::cuda::sm80
