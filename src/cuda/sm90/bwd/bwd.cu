// SPDX-License-Identifier: Apache-2.0
#include "cuda/host/instance.h"
#include "cuda/host/launch.h"
#include "cuda/sm90/bwd/bwd.h"
#include "cuda/sm90/bwd/kernel.cuh"

namespace sagebwd::cuda::sm90 {
namespace {

template <typename T, int D, unsigned kWants>
void run(const BackwardParams& p, cudaStream_t stream) {
  // Rows of key heads, and some more for parts.
  const int more = (p.parted * (p.parts - 1) + p.k_blocks - 1) / p.k_blocks;
  launch(p.dq_halves ? backward_kernel<T, D, __half, kWants> : backward_kernel<T, D, float, kWants>,
         dim3(static_cast<unsigned>(p.k_blocks), static_cast<unsigned>(p.hk + more)), bwd::kThreads,
         static_cast<int>(sizeof(bwd::SharedPlan<D, kWants>)), p, stream, Start::early);
}

template <typename T, int D>
void run(const BackwardParams& p, cudaStream_t stream) {
  using bwd::kInTurn, bwd::kRowSums;
  const bool in_turn = p.turns != nullptr;
  if (p.row_sum != nullptr)
    in_turn ? run<T, D, kRowSums | kInTurn>(p, stream) : run<T, D, kRowSums>(p, stream);
  else
    in_turn ? run<T, D, kInTurn>(p, stream) : run<T, D, 0>(p, stream);
}

}  // namespace

void launch_backward(const BackwardParams& p, Dtype dtype, int d, cudaStream_t stream) {
  with_instance(dtype, d, [&]<typename T, int D>() { run<T, D>(p, stream); });
}

}  // namespace sagebwd::cuda::sm90
