// SPDX-License-Identifier: Apache-2.0
#include "cuda/host/launch.h"
#include "cuda/sm90/bwd/bwd.h"
#include "cuda/sm90/bwd/kernel.cuh"

namespace sagebwd::cuda::sm90 {
namespace {

template <typename T, int D, unsigned kWants>
void run(const BackwardParams& p, int k_blocks, cudaStream_t stream) {
  launch(p.dq_halves ? backward_kernel<T, D, __half, kWants> : backward_kernel<T, D, float, kWants>,
         dim3(static_cast<unsigned>(k_blocks), static_cast<unsigned>(p.hk)), bwd::kThreads,
         static_cast<int>(sizeof(bwd::SharedPlan<D, kWants>)), p, stream, Start::early);
}

template <typename T, int D>
void run(const BackwardParams& p, int k_blocks, cudaStream_t stream) {
  using bwd::kDk16, bwd::kInTurn, bwd::kRowSums;
  const bool in_turn = p.turns != nullptr;
  if (p.dk16)
    in_turn ? run<T, D, kDk16 | kInTurn>(p, k_blocks, stream)
            : run<T, D, kDk16>(p, k_blocks, stream);
  else if (p.row_sum != nullptr)
    in_turn ? run<T, D, kRowSums | kInTurn>(p, k_blocks, stream)
            : run<T, D, kRowSums>(p, k_blocks, stream);
  else
    in_turn ? run<T, D, kInTurn>(p, k_blocks, stream) : run<T, D, 0>(p, k_blocks, stream);
}

template <typename T>
void run(const BackwardParams& p, int d, int k_blocks, cudaStream_t stream) {
  d == 64 ? run<T, 64>(p, k_blocks, stream) : run<T, 128>(p, k_blocks, stream);
}

}  // namespace

void launch_backward(const BackwardParams& p, Dtype dtype, int d, int k_blocks,
                     cudaStream_t stream) {
  dtype == Dtype::bf16 ? run<__nv_bfloat16>(p, d, k_blocks, stream)
                       : run<__half>(p, d, k_blocks, stream);
}

}  // namespace sagebwd::cuda::sm90
