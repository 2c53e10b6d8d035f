// SPDX-License-Identifier: Apache-2.0
// The codes that a forward leaves for a backward (sagebwd/codes.h), in the caller's memory. Those
// of tokens are copied, because their rows are padded in the workspace. Scales and centres lie
// there from the start.
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
  int8_t* codes;  // [heads, tokens, pitch]
  int8_t* saved;  // [heads, tokens, d]
};
void launch_save(const SavedCodesJob& job, cudaStream_t stream);
void launch_load(const SavedCodesJob& job, cudaStream_t stream);

}  // namespace sagebwd::cuda::plain
