// SPDX-License-Identifier: Apache-2.0
// Which kernels make a backward.
#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include "cuda/host/launch.h"
#include "cuda/sm80/bwd/bwd.h"
#include "cuda/sm80/bwd/launch.h"

namespace sagebwd::cuda::sm80 {
namespace {

template <typename T, int D>
void run(const BackwardParams& p, Scheme scheme, Rounding rounding, int q_blocks, int k_blocks,
         cudaStream_t stream) {
  if (p.dq_sum != nullptr) {
    launch_fused<T, D>(p, scheme, rounding, k_blocks, stream);
    launch_query_sums<T, D>(p, q_blocks, stream);
    return;
  }
  if (rounding == Rounding::dither) {
    launch_dithered<T, D>(p, q_blocks, k_blocks, stream);
    return;
  }
  const bool paper = scheme == Scheme::paper;
  launch_key_blocks<T, D>(p, paper, k_blocks, stream);
  launch_query_blocks<T, D>(p, paper, q_blocks, stream);
}

}  // namespace

BackwardTiles backward_tiles(Scheme scheme, int padded_d, bool fused) {
  if (fused) return fused_tiles(scheme, padded_d);
  if (scheme == Scheme::paper) return {128, 64};
  return {64, padded_d == 64 ? kQueryTileK<64> : kQueryTileK<128>};
}

void launch_backward(const BackwardParams& p, Dtype dtype, Scheme scheme, Rounding rounding,
                     int padded_d, int q_blocks, int k_blocks, cudaStream_t stream) {
  if (dtype == Dtype::bf16)
    padded_d == 64 ? run<__nv_bfloat16, 64>(p, scheme, rounding, q_blocks, k_blocks, stream)
                   : run<__nv_bfloat16, 128>(p, scheme, rounding, q_blocks, k_blocks, stream);
  else
    padded_d == 64 ? run<__half, 64>(p, scheme, rounding, q_blocks, k_blocks, stream)
                   : run<__half, 128>(p, scheme, rounding, q_blocks, k_blocks, stream);
}

}  // namespace sagebwd::cuda::sm80
