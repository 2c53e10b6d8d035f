// SPDX-License-Identifier: Apache-2.0
// The codes that a forward leaves for a backward (sagebwd/codes.h), in the caller's memory. What
// has the same shape in the workspace (scales of Q and V, means, mean logits) lies there from the
// start.
#pragma once

#include <cuda_runtime_api.h>

#include "cuda/plain/params.h"

namespace sagebwd::cuda::plain {

/// Q, K or V.
struct SavedCodesJob {
  Batch batch;
  bool queries;
  int heads, d, pitch;
  int64_t tokens;
  Operand x;      // codes, and the scale of K
  int8_t* saved;  // [heads, tokens, d]
  // Scales of K; null for the others. A poisoned key is marked in its codes.
  float* k_scale;  // [heads, tokens] if per_token, else [heads, key_blocks]
  bool per_token;
  int64_t key_blocks;      // of kKeysPerScale keys
  Sequences scale_blocks;  // the sequences cut into such blocks
};
void launch_save(const SavedCodesJob& job, cudaStream_t stream);
void launch_load(const SavedCodesJob& job, cudaStream_t stream);

}  // namespace sagebwd::cuda::plain
