// SPDX-License-Identifier: Apache-2.0
// INT8 attention forward on mma.sync.
#pragma once

#include <cuda_runtime_api.h>

#include "cuda/sm80/params.h"
#include "sagebwd/types.h"

namespace sagebwd::cuda::sm80 {

/// A call's instance and grid. padded_d: 64 or 128. tile_k: 128, or 64 in `paper` and for block
/// lists.
struct ForwardCall {
  const ForwardParams& params;
  bool paper;
  Dtype dtype;
  int padded_d, tile_k, q_blocks, heads;
  cudaStream_t stream;
};

void launch_forward(const ForwardCall& call);

// Instances of which each kind has a file of its own, to compile beside the others: those that cap
// logits, those that walk block lists.
void launch_capped_forward(const ForwardCall& call);
void launch_listed_forward(const ForwardCall& call);

}  // namespace sagebwd::cuda::sm80
