// SPDX-License-Identifier: Apache-2.0
// Instances of the fused backward that round the codes of dS for dQ by dither.
#include "cuda/sm80/bwd/fused/choose.cuh"
#include "cuda/sm80/bwd/launch.h"

namespace sagebwd::cuda::sm80 {

void launch_dithered_dq(const BackwardCall& call) {
  fused_backward::run_as_wanted<fused_backward::kDitherDq>(call);
}

}  // namespace sagebwd::cuda::sm80
