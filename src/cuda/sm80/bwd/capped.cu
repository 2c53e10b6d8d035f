// SPDX-License-Identifier: Apache-2.0
// Instances of the fused backward that cap logits. Rows of their dS sum to nothing that is
// known, so all add those sums up.
#include "cuda/sm80/bwd/fused/choose.cuh"
#include "cuda/sm80/bwd/launch.h"

namespace sagebwd::cuda::sm80 {

void launch_capped(const BackwardCall& call) {
  fused_backward::run<fused_backward::kCapped | fused_backward::kGeneral>(call);
}

}  // namespace sagebwd::cuda::sm80
