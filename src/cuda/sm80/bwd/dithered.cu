// SPDX-License-Identifier: Apache-2.0
// Instances of the fused backward that round by dither: recipe `paper`.
#include "cuda/sm80/bwd/fused/choose.cuh"
#include "cuda/sm80/bwd/launch.h"

namespace sagebwd::cuda::sm80 {

using fused_backward::Policy;

void launch_dithered(const BackwardCall& call) {
  fused_backward::run<Policy::dither, Scheme::paper>(call);
}

}  // namespace sagebwd::cuda::sm80
