// SPDX-License-Identifier: Apache-2.0
// Instances of the forward kernel that cap logits.
#include "cuda/sm80/fwd/fwd.h"
#include "cuda/sm80/fwd/kernel.cuh"

namespace sagebwd::cuda::sm80 {

using fwd::Instance;

void launch_capped_forward(const ForwardCall& call) {
  run_forward<Instance::capped_narrow, Instance::capped_wide>(call);
}

}  // namespace sagebwd::cuda::sm80
