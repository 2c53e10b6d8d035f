// SPDX-License-Identifier: Apache-2.0
// Instances of the forward kernel, and their choice.
#include "cuda/host/launch.h"
#include "cuda/sm80/fwd/fwd.h"
#include "cuda/sm80/fwd/kernel.cuh"

namespace sagebwd::cuda::sm80 {
namespace {

/// Small thread blocks, three or four of them on a multiprocessor: while one waits at its barrier,
/// or for its products, the others have work of another kind.
constexpr int kWarps = 4;

template <typename T, int D, int kTileK>
void run(const ForwardParams& p, int q_blocks, int heads, cudaStream_t stream) {
  constexpr int kResident = D == 64 ? 3 : 2;
  constexpr int kPerBlock = kBlock / (16 * kWarps);
  launch(forward_kernel<T, D, kTileK, kWarps, kResident>,
         dim3(static_cast<unsigned>(q_blocks * kPerBlock), static_cast<unsigned>(heads)),
         32 * kWarps, static_cast<int>(sizeof(ForwardShared<D, kTileK>)), p, stream);
}

template <typename T, int D>
void run(const ForwardParams& p, int tile_k, int q_blocks, int heads, cudaStream_t stream) {
  tile_k == 64 ? run<T, D, 64>(p, q_blocks, heads, stream)
               : run<T, D, 128>(p, q_blocks, heads, stream);
}

template <typename T>
void run(const ForwardParams& p, int padded_d, int tile_k, int q_blocks, int heads,
         cudaStream_t stream) {
  padded_d == 64 ? run<T, 64>(p, tile_k, q_blocks, heads, stream)
                 : run<T, 128>(p, tile_k, q_blocks, heads, stream);
}

}  // namespace

void launch_forward(const ForwardParams& p, Dtype dtype, int padded_d, int tile_k, int q_blocks,
                    int heads, cudaStream_t stream) {
  dtype == Dtype::bf16 ? run<__nv_bfloat16>(p, padded_d, tile_k, q_blocks, heads, stream)
                       : run<__half>(p, padded_d, tile_k, q_blocks, heads, stream);
}

}  // namespace sagebwd::cuda::sm80
