// SPDX-License-Identifier: Apache-2.0
// Instances of the dQ kernel.
#include "cuda/sm80/bwd/query_block.cuh"

namespace sagebwd::cuda::sm80 {

template <typename T, int D>
void launch_query_blocks(const BackwardParams& p, bool paper, int q_blocks, cudaStream_t stream) {
  paper ? run_query_blocks<T, D, true, Rounding::nearest>(p, q_blocks, stream)
        : run_query_blocks<T, D, false, Rounding::nearest>(p, q_blocks, stream);
}

template void launch_query_blocks<__nv_bfloat16, 64>(const BackwardParams&, bool, int,
                                                     cudaStream_t);
template void launch_query_blocks<__nv_bfloat16, 128>(const BackwardParams&, bool, int,
                                                      cudaStream_t);
template void launch_query_blocks<__half, 64>(const BackwardParams&, bool, int, cudaStream_t);
template void launch_query_blocks<__half, 128>(const BackwardParams&, bool, int, cudaStream_t);

}  // namespace sagebwd::cuda::sm80
