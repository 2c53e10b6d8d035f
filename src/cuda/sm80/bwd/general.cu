// SPDX-License-Identifier: Apache-2.0
// Instances of the fused backward for deterministic calls and for `partial_kv`.
#include "cuda/sm80/bwd/fused/choose.cuh"
#include "cuda/sm80/bwd/launch.h"

namespace sagebwd::cuda::sm80 {

using fused_backward::Policy;

void launch_general(const BackwardCall& call, Scheme scheme) {
  scheme == Scheme::paper ? fused_backward::run<Policy::general, Scheme::paper>(call)
                          : fused_backward::run<Policy::general, Scheme::vectorwise>(call);
}

}  // namespace sagebwd::cuda::sm80
