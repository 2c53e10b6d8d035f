// SPDX-License-Identifier: Apache-2.0
// Instances of the forward kernel that walk block lists.
#include "cuda/sm80/fwd/fwd.h"
#include "cuda/sm80/fwd/kernel.cuh"

namespace sagebwd::cuda::sm80 {

using fwd::Instance;

void launch_listed_forward(const ForwardCall& call) {
  call.tile_k == 64 ? run_forward<Instance::listed_narrow_64, Instance::listed_wide_64>(call)
                    : run_forward<Instance::listed_narrow, Instance::listed_wide>(call);
}

}  // namespace sagebwd::cuda::sm80
