// SPDX-License-Identifier: Apache-2.0
// Instances of the dK, dV kernel. Two stages where shared memory allows.
#include "cuda/host/launch.h"
#include "cuda/sm80/bwd/key_block.cuh"
#include "cuda/sm80/bwd/launch.h"

namespace sagebwd::cuda::sm80 {
namespace {

template <typename T, int D, bool kPaper, int kStages>
void run(const BackwardParams& p, int k_blocks, cudaStream_t stream) {
  launch(key_block_kernel<T, D, kPaper, kStages>,
         dim3(static_cast<unsigned>(k_blocks * (kBlock / kKeyRows)), static_cast<unsigned>(p.hk)),
         kKeyThreads, static_cast<int>(sizeof(KeyBlockShared<D, kStages>)), p, stream);
}

template <typename T, int D, bool kPaper>
void run(const BackwardParams& p, int k_blocks, cudaStream_t stream) {
  if constexpr (D == 64)
    run<T, D, kPaper, 2>(p, k_blocks, stream);
  else if (static_cast<int>(sizeof(KeyBlockShared<D, 2>)) <= shared_memory_limit())
    run<T, D, kPaper, 2>(p, k_blocks, stream);
  else
    run<T, D, kPaper, 1>(p, k_blocks, stream);
}

}  // namespace

template <typename T, int D>
void launch_key_blocks(const BackwardParams& p, bool paper, int k_blocks, cudaStream_t stream) {
  paper ? run<T, D, true>(p, k_blocks, stream) : run<T, D, false>(p, k_blocks, stream);
}

template void launch_key_blocks<__nv_bfloat16, 64>(const BackwardParams&, bool, int, cudaStream_t);
template void launch_key_blocks<__nv_bfloat16, 128>(const BackwardParams&, bool, int, cudaStream_t);
template void launch_key_blocks<__half, 64>(const BackwardParams&, bool, int, cudaStream_t);
template void launch_key_blocks<__half, 128>(const BackwardParams&, bool, int, cudaStream_t);

}  // namespace sagebwd::cuda::sm80
