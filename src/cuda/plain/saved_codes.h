// SPDX-License-Identifier: Apache-2.0
// The codes that a forward leaves for a backward (sagebwd/codes.h), in the caller's memory. What
// has the same shape in the workspace (scales of Q and V, means, mean logits; in `tokenwise` the
// scales of K and the centres) lies there from the start.
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
  // [heads, key_blocks]: scales of K that blocks of keys share, which mark a poisoned key in its
  // codes. Null for the others.
  float* k_scale;
  int64_t key_blocks;      // of kKeysPerScale keys
  Sequences scale_blocks;  // the sequences cut into such blocks
};
void launch_save(const SavedCodesJob& job, cudaStream_t stream);
void launch_load(const SavedCodesJob& job, cudaStream_t stream);

}  // namespace sagebwd::cuda::plain
