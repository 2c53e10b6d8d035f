// SPDX-License-Identifier: Apache-2.0
#include "cuda/cuda.h"
#include "cuda/plain/implementation.h"
#include "cuda/sla2/implementation.h"
#include "cuda/sm80/implementation.h"
#include "cuda/sm90/implementation.h"

namespace sagebwd::cuda {

std::vector<const backend::Implementation*> implementations() {
  return {&sm90::implementation(), &sm80::implementation(), &plain::implementation()};
}

std::vector<const backend::Sla2*> sla2_implementations() { return {&sla2::implementation()}; }

std::vector<int64_t> linear_head_dims(Dtype dtype) {
  if (dtype == Dtype::f32) return {};
  return {sla2::kHeadDims.begin(), sla2::kHeadDims.end()};
}

int64_t tuned_head_dim(Dtype dtype) { return dtype == Dtype::f32 ? 0 : sm80::kMostHeadDim; }

}  // namespace sagebwd::cuda
