// SPDX-License-Identifier: Apache-2.0
// Instances of the fused backward that add dQ up in any order, and the tiles of all.
#include "cuda/sm80/bwd/bwd.h"
#include "cuda/sm80/bwd/fused/choose.cuh"
#include "cuda/sm80/bwd/launch.h"

namespace sagebwd::cuda::sm80 {

using fused_backward::Policy;

BackwardTiles backward_tiles(Scheme scheme, int padded_d) {
  BackwardTiles tiles{};
  with_head_dim(padded_d, [&]<int D>() {
    const auto of = [&](auto choice) {
      constexpr fused_backward::Config kConfig =
          fused_backward::config_of(decltype(choice)::kInstance, Policy::fast);
      tiles = {kConfig.tile_q(), kConfig.tile_k()};
    };
    scheme == Scheme::paper ? fused_backward::with_choice<Policy::fast, Scheme::paper, D>(of)
                            : fused_backward::with_choice<Policy::fast, Scheme::vectorwise, D>(of);
  });
  return tiles;
}

void launch_fast(const BackwardCall& call, Scheme scheme) {
  scheme == Scheme::paper ? fused_backward::run<Policy::fast, Scheme::paper>(call)
                          : fused_backward::run<Policy::fast, Scheme::vectorwise>(call);
}

}  // namespace sagebwd::cuda::sm80
