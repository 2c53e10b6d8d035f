// SPDX-License-Identifier: Apache-2.0
// INT8 attention forward on mma.sync.
#pragma once

#include <cuda_runtime_api.h>

#include "cuda/sm80/params.h"
#include "sagebwd/recipe.h"
#include "sagebwd/types.h"

namespace sagebwd::cuda::sm80 {

/// tile_k is 64 or 128, padded_d is 64 or 128. Dither has tiles of 64 keys only.
void launch_forward(const ForwardParams& params, Dtype dtype, Rounding rounding, int padded_d,
                    int tile_k, int q_blocks, int heads, cudaStream_t stream);

/// The part of it that is dithered, in a file of its own.
void launch_dithered_forward(const ForwardParams& params, Dtype dtype, int padded_d, int q_blocks,
                             int heads, cudaStream_t stream);

}  // namespace sagebwd::cuda::sm80
