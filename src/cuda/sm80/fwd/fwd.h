// SPDX-License-Identifier: Apache-2.0
// INT8 attention forward on mma.sync.
#pragma once

#include <cuda_runtime_api.h>

#include "cuda/sm80/params.h"
#include "sagebwd/recipe.h"
#include "sagebwd/types.h"

namespace sagebwd::cuda::sm80 {

/// padded_d: 64 or 128. tile_k: 128, or 64 in `paper` and for block lists. Dither needs tiles of 64
/// keys.
void launch_forward(const ForwardParams& params, Dtype dtype, Rounding rounding, int padded_d,
                    int tile_k, int q_blocks, int heads, cudaStream_t stream);

/// The instances that round by dither. They have a file of their own, to compile beside the others.
void launch_dithered_forward(const ForwardParams& params, Dtype dtype, int padded_d, int q_blocks,
                             int heads, cudaStream_t stream);

/// Those that cap logits, likewise: `vectorwise`, rounded to nearest.
void launch_capped_forward(const ForwardParams& params, Dtype dtype, int padded_d, int q_blocks,
                           int heads, cudaStream_t stream);

/// Those that walk block lists, likewise.
void launch_listed_forward(const ForwardParams& params, Dtype dtype, int padded_d, int tile_k,
                           int q_blocks, int heads, cudaStream_t stream);

}  // namespace sagebwd::cuda::sm80
