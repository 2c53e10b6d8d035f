// SPDX-License-Identifier: Apache-2.0
// Instances of the fused backward for recipe `paper`.
#include "cuda/sm80/bwd/fused/choose.cuh"
#include "cuda/sm80/bwd/launch.h"

namespace sagebwd::cuda::sm80 {

void launch_paper(const BackwardCall& call) {
  fused_backward::run_as_wanted<fused_backward::kPaper>(call);
}

}  // namespace sagebwd::cuda::sm80
