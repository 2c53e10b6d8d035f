// SPDX-License-Identifier: Apache-2.0
// The kernels of the backward, one launch per instance file.
#pragma once

#include <cuda_runtime_api.h>

#include "cuda/sm80/params.h"
#include "sagebwd/types.h"

namespace sagebwd::cuda::sm80 {

/// The type and padded head dimension of the instance that a call takes, and the blocks of keys of
/// all its sequences.
struct BackwardCall {
  const BackwardParams& params;
  Dtype dtype;
  int padded_d, k_blocks;
  cudaStream_t stream;
};

// The fused backward: dK, dV, and dQ added up in dq_sum.
void launch_vectorwise(const BackwardCall& call);
void launch_paper(const BackwardCall& call);
void launch_dithered_dq(const BackwardCall& call);
void launch_capped(const BackwardCall& call);
void launch_listed(const BackwardCall& call);

/// dK and dV of the keys whose lists were cut, from the sums of the pieces.
void launch_piece_sums(const BackwardCall& call);

}  // namespace sagebwd::cuda::sm80
