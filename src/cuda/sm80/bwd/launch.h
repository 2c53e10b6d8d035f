// SPDX-License-Identifier: Apache-2.0
// Host entry points of the backward kernels, one per instance file.
#pragma once

#include <cuda_runtime_api.h>

#include "cuda/host/launch.h"
#include "cuda/sm80/bwd/bwd.h"
#include "cuda/sm80/params.h"
#include "sagebwd/recipe.h"

namespace sagebwd::cuda::sm80 {

// All are defined for D = 64 and 128, T = __nv_bfloat16 and __half.

/// The fused backward: dK, dV, and dQ added up in p.dq_sum. The calls that each serves are those of
/// its policy (fused/config.cuh).
template <typename T, int D>
void launch_fast(const BackwardParams& params, Scheme scheme, int k_blocks, cudaStream_t stream);
template <typename T, int D>
void launch_general(const BackwardParams& params, Scheme scheme, int k_blocks, cudaStream_t stream);
template <typename T, int D>
void launch_dithered(const BackwardParams& params, int k_blocks, cudaStream_t stream);
template <typename T, int D>
void launch_dithered_dq(const BackwardParams& params, int k_blocks, cudaStream_t stream);
template <typename T, int D>
void launch_capped(const BackwardParams& params, int k_blocks, cudaStream_t stream);
template <typename T, int D>
void launch_listed(const BackwardParams& params, int k_blocks, cudaStream_t stream);

/// Whether a call needs policy `general`.
constexpr bool wants_general(const BackwardParams& p) {
  return p.turns != nullptr || p.row_sum != nullptr || p.k_per_token;
}

/// dK and dV of the keys whose lists were cut, from the sums of the pieces.
template <typename T, int D>
void launch_piece_sums(const BackwardParams& params, cudaStream_t stream);

/// dQ from its sums.
template <typename T, int D>
void launch_query_sums(const BackwardParams& params, int q_blocks, cudaStream_t stream,
                       Start start = Start::behind);

void launch_query_sums(const BackwardParams& params, Dtype dtype, int padded_d, int q_blocks,
                       cudaStream_t stream, Start start = Start::behind);

}  // namespace sagebwd::cuda::sm80
