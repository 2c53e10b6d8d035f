// SPDX-License-Identifier: Apache-2.0
#include "cuda/host/launch.h"
#include "cuda/sm90/bwd/bwd.h"
#include "cuda/sm90/bwd/kernel.cuh"

namespace sagebwd::cuda::sm90 {
namespace {

template <typename T, int D, unsigned kWants>
auto* kernel_of(const BackwardParams& p) {
  return p.dq_halves ? backward_kernel<T, D, __half, kWants> : backward_kernel<T, D, float, kWants>;
}
template <typename T, int D>
auto* kernel_of(const BackwardParams& p) {
  using bwd::kInTurn, bwd::kRowSums;
  if (p.row_sum != nullptr)
    return p.turns != nullptr ? kernel_of<T, D, kRowSums | kInTurn>(p)
                              : kernel_of<T, D, kRowSums>(p);
  return p.turns != nullptr ? kernel_of<T, D, kInTurn>(p) : kernel_of<T, D, 0>(p);
}

template <typename T, int D>
void run(const BackwardParams& p, int k_blocks, cudaStream_t stream) {
  launch(kernel_of<T, D>(p), dim3(static_cast<unsigned>(k_blocks), static_cast<unsigned>(p.hk)),
         bwd::kThreads, static_cast<int>(sizeof(bwd::SharedPlan<D>)), p, stream, Start::early);
}

template <typename T>
void run(const BackwardParams& p, int d, int k_blocks, cudaStream_t stream) {
  d == 64 ? run<T, 64>(p, k_blocks, stream) : run<T, 128>(p, k_blocks, stream);
}

}  // namespace

void launch_backward(const BackwardParams& p, Dtype dtype, int d, int k_blocks,
                     cudaStream_t stream) {
  static_assert(kBackwardQueries == bwd::kQueries && kBackwardKeys == bwd::kKeys);
  dtype == Dtype::bf16 ? run<__nv_bfloat16>(p, d, k_blocks, stream)
                       : run<__half>(p, d, k_blocks, stream);
}

}  // namespace sagebwd::cuda::sm90
