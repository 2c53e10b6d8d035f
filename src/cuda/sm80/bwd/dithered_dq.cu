// SPDX-License-Identifier: Apache-2.0
// Instances of the fused backward that round the codes of dS for dQ by dither: recipe `tokenwise`.
#include "cuda/sm80/bwd/fused/choose.cuh"
#include "cuda/sm80/bwd/launch.h"

namespace sagebwd::cuda::sm80 {

void launch_dithered_dq(const BackwardCall& call) {
  using fused_backward::kDitherDq, fused_backward::kTokenwise;
  fused_backward::run_as_wanted<kTokenwise | kDitherDq, Scheme::tokenwise>(call);
}

}  // namespace sagebwd::cuda::sm80
