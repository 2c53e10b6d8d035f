// SPDX-License-Identifier: Apache-2.0
// dQ, dK and dV, each by a kernel of its own that finds P or dS anew: no atomics, so every result
// is bit-equal from run to run.
#pragma once

#include <cuda_runtime_api.h>

#include "cuda/plain/params.h"

namespace sagebwd::cuda::plain {

void launch_backward(const BackwardParams& params, cudaStream_t stream);

}  // namespace sagebwd::cuda::plain
