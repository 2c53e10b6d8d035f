// SPDX-License-Identifier: Apache-2.0
#include "cuda/host/launch.h"
#include "cuda/sm90/bwd/bwd.h"
#include "cuda/sm90/bwd/kernel.cuh"

namespace sagebwd::cuda::sm90 {
namespace {

template <typename T, int D, int kQueries, unsigned kWants>
void run(const BackwardParams& p, cudaStream_t stream) {
  const int64_t walks = static_cast<int64_t>(p.k_blocks) * p.hk;
  launch(p.dq_halves ? backward_kernel<T, D, kQueries, __half, kWants>
                     : backward_kernel<T, D, kQueries, float, kWants>,
         dim3(static_cast<unsigned>(walks + p.parted * (p.parts - 1))), bwd::kThreads,
         static_cast<int>(sizeof(bwd::SharedPlan<D, kQueries, kWants>)), p, stream, Start::early);
}

template <typename T, int D, int kQueries>
void run(const BackwardParams& p, cudaStream_t stream) {
  using bwd::kDk16, bwd::kInTurn, bwd::kRowSums;
  const bool in_turn = p.turns != nullptr;
  if (p.dk16)
    in_turn ? run<T, D, kQueries, kDk16 | kInTurn>(p, stream)
            : run<T, D, kQueries, kDk16>(p, stream);
  else if (p.row_sum != nullptr)
    in_turn ? run<T, D, kQueries, kRowSums | kInTurn>(p, stream)
            : run<T, D, kQueries, kRowSums>(p, stream);
  else
    in_turn ? run<T, D, kQueries, kInTurn>(p, stream) : run<T, D, kQueries, 0>(p, stream);
}

template <typename T>
void run(const BackwardParams& p, int d, int queries, cudaStream_t stream) {
  if (d == 64)
    queries == 64 ? run<T, 64, 64>(p, stream) : run<T, 64, 128>(p, stream);
  else
    run<T, 128, 64>(p, stream);
}

}  // namespace

void launch_backward(const BackwardParams& p, Dtype dtype, int d, int queries,
                     cudaStream_t stream) {
  dtype == Dtype::bf16 ? run<__nv_bfloat16>(p, d, queries, stream)
                       : run<__half>(p, d, queries, stream);
}

}  // namespace sagebwd::cuda::sm90
