// SPDX-License-Identifier: Apache-2.0
// Host entry points of the backward kernels, one per instance file.
#pragma once

#include <cuda_runtime_api.h>

#include "cuda/sm80/bwd/bwd.h"
#include "cuda/sm80/params.h"

namespace sagebwd::cuda::sm80 {

/// Defined for D = 64 and 128, T = __nv_bfloat16 and __half.
template <typename T, int D>
void launch_key_blocks(const BackwardParams& params, bool paper, int k_blocks, cudaStream_t stream);
template <typename T, int D>
void launch_fused(const BackwardParams& params, Scheme scheme, Rounding rounding, int k_blocks,
                  cudaStream_t stream);
template <typename T, int D>
void launch_query_sums(const BackwardParams& params, int q_blocks, cudaStream_t stream);
template <typename T, int D>
void launch_query_blocks(const BackwardParams& params, bool paper, int q_blocks,
                         cudaStream_t stream);

/// dK, dV and dQ of recipe `paper`, rounded by dither.
template <typename T, int D>
void launch_dithered(const BackwardParams& params, int q_blocks, int k_blocks, cudaStream_t stream);

/// Tiles of the fused kernel on the current device.
BackwardTiles fused_tiles(Scheme scheme, int padded_d);

/// Keys per tile of dQ in `vectorwise`, when it has its own kernel.
template <int D>
inline constexpr int kQueryTileK = D == 64 ? 128 : 64;

}  // namespace sagebwd::cuda::sm80
