// SPDX-License-Identifier: Apache-2.0
#include "cuda/sla2/implementation.h"

#include "cuda/sla2/linear/linear.h"
#include "cuda/sla2/mix/mix.h"

namespace sagebwd::cuda::sla2 {

const backend::Sla2& implementation() {
  static const backend::Sla2 impl{
      .name = "cuda-sm80",
      .decline = linear::decline,
      .workspace = linear::workspace_of,
      .forward = linear::forward,
      .backward = linear::backward,
      .mix = &mix::calls(),
  };
  return impl;
}

}  // namespace sagebwd::cuda::sla2
