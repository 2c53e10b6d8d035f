// SPDX-License-Identifier: Apache-2.0
#include "cuda/cuda.h"
#include "cuda/mix/mix.h"
#include "cuda/plain/implementation.h"
#include "cuda/sm80/implementation.h"
#include "cuda/sm90/implementation.h"

namespace sagebwd::cuda {

std::vector<const backend::Implementation*> implementations() {
  return {&sm90::implementation(), &sm80::implementation(), &plain::implementation()};
}

int64_t tuned_head_dim(Dtype dtype) { return dtype == Dtype::f32 ? 0 : sm80::kMostHeadDim; }

const backend::Mix& mix_calls() { return mix::implementation(); }

}  // namespace sagebwd::cuda
