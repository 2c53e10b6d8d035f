// SPDX-License-Identifier: Apache-2.0
// Instances of the forward kernel, and their choice.
#include "cuda/sm80/fwd/fwd.h"
#include "cuda/sm80/fwd/kernel.cuh"

namespace sagebwd::cuda::sm80 {

using fwd::Instance;

void launch_forward(const ForwardCall& call) {
  if (call.params.lists.rows != nullptr)
    launch_listed_forward(call);
  else if (call.params.cap.on())
    launch_capped_forward(call);
  else if (call.paper)
    run_forward<Instance::paper_narrow, Instance::paper_wide>(call);
  else
    run_forward<Instance::narrow, Instance::wide>(call);
}

}  // namespace sagebwd::cuda::sm80
