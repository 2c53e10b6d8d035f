// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cuda_runtime_api.h>

#include "cuda/quantize/quantize.h"
#include "sagebwd/types.h"

namespace sagebwd::cuda::sm90 {

/// The operands of a forward, or those that a backward makes of saved codes.
void launch_operands(const OperandJob& job, Dtype dtype, cudaStream_t stream);

}  // namespace sagebwd::cuda::sm90
