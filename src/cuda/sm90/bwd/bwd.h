// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cuda_runtime_api.h>

#include "cuda/sm90/params.h"
#include "sagebwd/types.h"

namespace sagebwd::cuda::sm90 {

inline constexpr int kBackwardKeys = 128;  // of a thread block

/// dK and dV, and dQ added up in p.dq_sum.
void launch_backward(const BackwardParams& p, Dtype dtype, int d, cudaStream_t stream);

}  // namespace sagebwd::cuda::sm90
