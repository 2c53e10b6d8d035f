// SPDX-License-Identifier: Apache-2.0
// INT8 attention backward on mma.sync: dK and dV, and dQ added up in memory.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "cuda/sm80/params.h"
#include "sagebwd/types.h"

namespace sagebwd::cuda::sm80 {

/// Queries that share a scale of P and dS in dV and dK, and keys that share a scale of dS in dQ, on
/// the current device.
struct BackwardTiles {
  int q, k;
};
BackwardTiles backward_tiles(bool paper, int padded_d);

/// params.general is found here. `dithers_dq`: the codes of dS for dQ are rounded by dither; not in
/// `paper`.
void launch_backward(BackwardParams params, Dtype dtype, bool paper, bool dithers_dq, int padded_d,
                     int k_blocks, cudaStream_t stream);

}  // namespace sagebwd::cuda::sm80
