// SPDX-License-Identifier: Apache-2.0
// Instances of the fused backward that walk block lists: recipe `vectorwise`.
#include "cuda/sm80/bwd/fused/choose.cuh"
#include "cuda/sm80/bwd/launch.h"

namespace sagebwd::cuda::sm80 {

using fused_backward::Policy;

void launch_listed(const BackwardCall& call) {
  wants_general(call.params) ? fused_backward::run<Policy::general_lists, Scheme::vectorwise>(call)
                             : fused_backward::run<Policy::lists, Scheme::vectorwise>(call);
}

}  // namespace sagebwd::cuda::sm80
