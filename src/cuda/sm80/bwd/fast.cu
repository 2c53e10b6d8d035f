// SPDX-License-Identifier: Apache-2.0
// Instances of the fused backward that add dQ up in any order, and the tiles of all.
#include "cuda/sm80/bwd/fused/choose.cuh"
#include "cuda/sm80/bwd/launch.h"

namespace sagebwd::cuda::sm80 {
namespace {

using fused_backward::Policy;

template <Scheme kScheme, int D>
BackwardTiles tiles() {
  return fused_backward::with_choice<Policy::fast, kScheme, D>([](auto choice) {
    constexpr fused_backward::Config kConfig =
        fused_backward::config_of(decltype(choice)::kInstance, Policy::fast);
    return BackwardTiles{kConfig.tile_q(), kConfig.tile_k()};
  });
}

}  // namespace

BackwardTiles backward_tiles(Scheme scheme, int padded_d) {
  if (scheme == Scheme::paper)
    return padded_d == 64 ? tiles<Scheme::paper, 64>() : tiles<Scheme::paper, 128>();
  return padded_d == 64 ? tiles<Scheme::vectorwise, 64>() : tiles<Scheme::vectorwise, 128>();
}

template <typename T, int D>
void launch_fast(const BackwardParams& p, Scheme scheme, int k_blocks, cudaStream_t stream) {
  scheme == Scheme::paper
      ? fused_backward::run<Policy::fast, Scheme::paper, T, D>(p, k_blocks, stream)
      : fused_backward::run<Policy::fast, Scheme::vectorwise, T, D>(p, k_blocks, stream);
}

template void launch_fast<__nv_bfloat16, 64>(const BackwardParams&, Scheme, int, cudaStream_t);
template void launch_fast<__nv_bfloat16, 128>(const BackwardParams&, Scheme, int, cudaStream_t);
template void launch_fast<__half, 64>(const BackwardParams&, Scheme, int, cudaStream_t);
template void launch_fast<__half, 128>(const BackwardParams&, Scheme, int, cudaStream_t);

}  // namespace sagebwd::cuda::sm80
