// SPDX-License-Identifier: Apache-2.0
// Instances of the forward kernel for recipe `tokenwise`.
#include "cuda/sm80/fwd/fwd.h"
#include "cuda/sm80/fwd/kernel.cuh"

namespace sagebwd::cuda::sm80 {

using fwd::Instance;

void launch_tokenwise_forward(const ForwardCall& call) {
  run_forward<Instance::tokenwise_narrow, Instance::tokenwise_wide>(call);
}

}  // namespace sagebwd::cuda::sm80
