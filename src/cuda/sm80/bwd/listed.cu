// SPDX-License-Identifier: Apache-2.0
// Instances of the fused backward that walk block lists: recipe `tokenwise`.
#include "cuda/sm80/bwd/fused/choose.cuh"
#include "cuda/sm80/bwd/launch.h"

namespace sagebwd::cuda::sm80 {

void launch_listed(const BackwardCall& call) {
  using fused_backward::kLists, fused_backward::kTokenwise;
  fused_backward::run_as_wanted<kTokenwise | kLists, Scheme::tokenwise>(call);
}

}  // namespace sagebwd::cuda::sm80
