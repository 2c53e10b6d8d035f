// SPDX-License-Identifier: Apache-2.0
// O, LSE and the largest logit of each block of queries.
#pragma once

#include <cuda_runtime_api.h>

#include "cuda/plain/params.h"

namespace sagebwd::cuda::plain {

void launch_forward(const ForwardParams& params, cudaStream_t stream);

}  // namespace sagebwd::cuda::plain
