// SPDX-License-Identifier: Apache-2.0
// INT8 attention backward on mma.sync: dK and dV, and dQ added up in memory.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "cuda/sm80/params.h"
#include "sagebwd/recipe.h"
#include "sagebwd/types.h"

namespace sagebwd::cuda::sm80 {

/// Queries that share a scale of P and dS in dV and dK, and keys that share a scale of dS in dQ, on
/// the current device.
struct BackwardTiles {
  int q, k;
};
BackwardTiles backward_tiles(Scheme scheme, int padded_d);

/// `dithered`: of dV, dQ and dK, those whose codes of P or dS are rounded by dither (Matmul bits).
/// That is all or none in `paper`, dQ or none in `vectorwise`.
void launch_backward(const BackwardParams& params, Dtype dtype, Scheme scheme, uint32_t dithered,
                     int padded_d, int k_blocks, cudaStream_t stream);

}  // namespace sagebwd::cuda::sm80
