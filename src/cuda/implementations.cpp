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

const backend::Mix& mix_calls() { return mix::implementation(); }

}  // namespace sagebwd::cuda
