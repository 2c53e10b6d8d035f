// SPDX-License-Identifier: Apache-2.0
// Instances of the forward kernel that round by dither: recipe `paper`.
#include "cuda/sm80/fwd/fwd.h"
#include "cuda/sm80/fwd/kernel.cuh"

namespace sagebwd::cuda::sm80 {

using fwd::Instance;

void launch_dithered_forward(const ForwardCall& call) {
  run_forward<Instance::dithered_narrow, Instance::dithered_wide>(call);
}

}  // namespace sagebwd::cuda::sm80
