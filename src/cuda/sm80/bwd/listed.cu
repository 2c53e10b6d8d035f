// SPDX-License-Identifier: Apache-2.0
// Instances of the fused backward that walk block lists.
#include "cuda/sm80/bwd/fused/choose.cuh"
#include "cuda/sm80/bwd/launch.h"

namespace sagebwd::cuda::sm80 {

void launch_listed(const BackwardCall& call) {
  fused_backward::run_as_wanted<fused_backward::kLists>(call);
}

}  // namespace sagebwd::cuda::sm80
