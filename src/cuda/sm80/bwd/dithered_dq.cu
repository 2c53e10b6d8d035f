// SPDX-License-Identifier: Apache-2.0
// Instances of the fused backward that round the codes of dS for dQ by dither: recipe `vectorwise`.
#include "cuda/sm80/bwd/fused/choose.cuh"
#include "cuda/sm80/bwd/launch.h"

namespace sagebwd::cuda::sm80 {

using fused_backward::Policy;

void launch_dithered_dq(const BackwardCall& call) {
  constexpr Scheme kScheme = Scheme::vectorwise;
  wants_general(call.params) ? fused_backward::run<Policy::general_dither_dq, kScheme>(call)
                             : fused_backward::run<Policy::fast_dither_dq, kScheme>(call);
}

}  // namespace sagebwd::cuda::sm80
