// SPDX-License-Identifier: Apache-2.0
#include "cuda/host/instance.h"
#include "cuda/host/launch.h"
#include "cuda/sm90/bwd/bwd.h"
#include "cuda/sm90/bwd/kernel.cuh"

namespace sagebwd::cuda::sm90 {
namespace {

using bwd::Wants;

/// Sum: what dQ is added up in, float or __half.
template <typename T, int D, typename Sum, Wants kWants>
void run(const BackwardParams& p, cudaStream_t stream) {
  // Rows of key heads, and some more for parts.
  const int more = (p.parted * (p.parts - 1) + p.k_blocks - 1) / p.k_blocks;
  launch(backward_kernel<T, D, Sum, kWants>,
         dim3(static_cast<unsigned>(p.k_blocks), static_cast<unsigned>(p.hk + more)), bwd::kThreads,
         static_cast<int>(sizeof(bwd::SharedPlan<D>)), p, stream, Start::early);
}

template <typename T, int D>
void choose(const BackwardParams& p, cudaStream_t stream) {
  const bool in_turn = p.turns != nullptr, adds_rows = p.row_sum != nullptr;
  if (p.dq_halves)
    adds_rows ? run<T, D, __half, Wants::what_comes>(p, stream)
    : in_turn ? run<T, D, __half, Wants::turns>(p, stream)
              : run<T, D, __half, Wants::nothing>(p, stream);
  else
    adds_rows || in_turn ? run<T, D, float, Wants::what_comes>(p, stream)
                         : run<T, D, float, Wants::nothing>(p, stream);
}

}  // namespace

void launch_backward(const BackwardParams& p, Dtype dtype, int d, cudaStream_t stream) {
  with_instance(dtype, d, [&]<typename T, int D>() { choose<T, D>(p, stream); });
}

}  // namespace sagebwd::cuda::sm90
