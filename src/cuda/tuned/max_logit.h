// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

namespace sagebwd::cuda::tuned {

/// Largest logits as main kernels leave them (tile/ordered.cuh) back to floats: 0 (nothing seen) is
/// -inf.
void launch_decode_max(const uint32_t* codes, float* out, int64_t count, cudaStream_t stream);

}  // namespace sagebwd::cuda::tuned
