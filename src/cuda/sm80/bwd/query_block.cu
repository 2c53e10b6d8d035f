// SPDX-License-Identifier: Apache-2.0
// Instances of the dQ kernel. Two stages where shared memory allows.
#include "cuda/host/launch.h"
#include "cuda/sm80/bwd/launch.h"
#include "cuda/sm80/bwd/query_block.cuh"

namespace sagebwd::cuda::sm80 {
namespace {

/// `vectorwise` has small thread blocks, several on a multiprocessor; `paper` needs whole tiles of
/// 128 queries.
template <typename T, int D, int kTileK, bool kPaper, int kStages>
void run(const BackwardParams& p, int q_blocks, cudaStream_t stream) {
  constexpr int kPairs = kPaper ? 4 : 2, kResident = kPaper ? 1 : 2;
  constexpr int kPerBlock = kBlock / (tile::kPairRows * kPairs);
  launch(query_block_kernel<T, D, kTileK, kPairs, kResident, kPaper, kStages>,
         dim3(static_cast<unsigned>(q_blocks * kPerBlock), static_cast<unsigned>(p.h)), 64 * kPairs,
         static_cast<int>(sizeof(QueryBlockShared<D, kTileK, kPairs, kStages>)), p, stream);
}

template <typename T, int D, bool kPaper>
void run(const BackwardParams& p, int q_blocks, cudaStream_t stream) {
  constexpr int kTileK = kPaper ? 64 : kQueryTileK<D>;
  if constexpr (D == 64)
    run<T, D, kTileK, kPaper, 2>(p, q_blocks, stream);
  else if (static_cast<int>(sizeof(QueryBlockShared < D, kTileK, kPaper ? 4 : 2, 2 >)) <=
           shared_memory_limit())
    run<T, D, kTileK, kPaper, 2>(p, q_blocks, stream);
  else
    run<T, D, kTileK, kPaper, 1>(p, q_blocks, stream);
}

}  // namespace

template <typename T, int D>
void launch_query_blocks(const BackwardParams& p, bool paper, int q_blocks, cudaStream_t stream) {
  paper ? run<T, D, true>(p, q_blocks, stream) : run<T, D, false>(p, q_blocks, stream);
}

template void launch_query_blocks<__nv_bfloat16, 64>(const BackwardParams&, bool, int,
                                                     cudaStream_t);
template void launch_query_blocks<__nv_bfloat16, 128>(const BackwardParams&, bool, int,
                                                      cudaStream_t);
template void launch_query_blocks<__half, 64>(const BackwardParams&, bool, int, cudaStream_t);
template void launch_query_blocks<__half, 128>(const BackwardParams&, bool, int, cudaStream_t);

}  // namespace sagebwd::cuda::sm80
