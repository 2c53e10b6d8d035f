// SPDX-License-Identifier: Apache-2.0
// The kernel of codes: codes of Q, K and V.
#pragma once

#include <cuda_runtime_api.h>

#include "cuda/sm90/quantize/job.h"
#include "sagebwd/types.h"

namespace sagebwd::cuda::sm90 {

void launch_codes(const CodesJob& job, Dtype dtype, cudaStream_t stream);

}  // namespace sagebwd::cuda::sm90
