// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cuda_runtime_api.h>

#include "cuda/sm90/params.h"
#include "sagebwd/types.h"

namespace sagebwd::cuda::sm90 {

inline constexpr int kForwardQueries = 192;  // rows of a copy of Q8
inline constexpr int kForwardKeys = 128;     // of a tile

void launch_forward(const ForwardParams& p, Dtype dtype, int d, cudaStream_t stream);

// The same for calls with block lists, of one head dim.
inline constexpr int kListedForwardQueries = 128, kListedForwardKeys = 64, kListedForwardD = 128;

void launch_listed_forward(const ListedParams& p, Dtype dtype, cudaStream_t stream);

}  // namespace sagebwd::cuda::sm90
