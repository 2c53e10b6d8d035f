// SPDX-License-Identifier: Apache-2.0
// Host entry points of the two backward kernels, one per instance file.
#pragma once

#include <cuda_runtime_api.h>

#include "cuda/host/params.h"

namespace sagebwd::cuda::sm80 {

/// The most shared memory a thread block of the current device may use.
int shared_memory_limit();

/// Defined for D = 64 and 128, T = __nv_bfloat16 and __half.
template <typename T, int D>
void launch_key_blocks(const BackwardParams& params, bool paper, int k_blocks, cudaStream_t stream);
template <typename T, int D>
void launch_query_blocks(const BackwardParams& params, bool paper, int q_blocks,
                         cudaStream_t stream);

/// Keys per tile of dQ in `vectorwise`.
template <int D>
inline constexpr int kQueryTileK = D == 64 ? 128 : 64;

}  // namespace sagebwd::cuda::sm80
