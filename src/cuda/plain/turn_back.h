// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cuda_runtime_api.h>

#include "cuda/plain/params.h"

namespace sagebwd::cuda::plain {

/// Turns dQ or dK of rotated Q and K back and writes it to the caller's tensor:
/// factor·(row·Rᵀ + row_sum·mean).
struct TurnBackJob {
  Batch batch;
  bool queries;
  int heads, group, d;
  int64_t tokens;
  const float* rows;     // [heads, tokens, d]
  const float* row_sum;  // [heads, tokens]
  const float* mean;     // [sequences, heads / group, d]; null: nothing is added
  float factor;
  Strided to;
};
void launch_turn_back(const TurnBackJob& job, cudaStream_t stream);

}  // namespace sagebwd::cuda::plain
