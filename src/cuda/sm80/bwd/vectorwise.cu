// SPDX-License-Identifier: Apache-2.0
// Instances of the fused backward for every recipe but `paper`, and the tiles of all.
#include "cuda/sm80/bwd/bwd.h"
#include "cuda/sm80/bwd/fused/choose.cuh"
#include "cuda/sm80/bwd/launch.h"

namespace sagebwd::cuda::sm80 {

BackwardTiles backward_tiles(bool paper, int padded_d) {
  using fused_backward::kGeneral, fused_backward::kPaper, fused_backward::with_choice;
  BackwardTiles tiles{};
  const auto of = [&](auto choice) {
    constexpr fused_backward::Config kConfig =
        fused_backward::config_of(decltype(choice)::kInstance, kGeneral);
    tiles = {kConfig.tile_q(), kConfig.tile_k()};
  };
  with_head_dim(padded_d, [&]<int D>() {
    paper ? with_choice<kPaper | kGeneral, D>(of) : with_choice<kGeneral, D>(of);
  });
  return tiles;
}

void launch_vectorwise(const BackwardCall& call) { fused_backward::run_as_wanted<0>(call); }

}  // namespace sagebwd::cuda::sm80
