// SPDX-License-Identifier: Apache-2.0
// From the caller's tensors to the arrays of params.h: means, codes with their scales, FP32 copies,
// and what each query carries.
#pragma once

#include <cuda_runtime_api.h>

#include "cuda/plain/params.h"

namespace sagebwd::cuda::plain {

/// Mean over the keys of each sequence. Tokens that hold NaN or Inf are left out.
struct MeanJob {
  Batch batch;
  int heads, d;
  Strided x;
  double* part;  // [heads, k blocks, d]
  int* counted;  // [heads, k blocks]: tokens in each part
  float* mean;   // [sequences, heads, d]
};
void launch_mean(const MeanJob& job, cudaStream_t stream);

/// Codes, scales and copies of one tensor. Whatever is null is not made.
struct TokenJob {
  Batch batch;
  bool queries;  // whether the tokens are queries or keys
  int heads, d, pitch;
  int64_t tokens;
  Strided x;
  const float* mean;   // [sequences, heads, d]: subtracted first
  int tile;            // tokens of a tile
  bool scale_by_tile;  // one scale per tile; else one per token
  float* tile_mean;    // [heads, blocks, d]: mean of the tile, subtracted before quantisation
  Operand to;
  float* tile_scale;  // [heads, blocks]: scale of the tile, NaN if it holds NaN or Inf
};
void launch_tokens(const TokenJob& job, cudaStream_t stream);

struct RowJob {
  Batch batch;
  int h, group, d;
  int64_t tq;
  float scale;
  Strided q;
  const float* k_mean;  // [sequences, h / group, d] or null
  double* mean_logit;
  // Backward only: lse2 is null in the forward.
  float *lse2, *delta;
  StridedStats lse, dlse;
  Strided o, dout;
};
void launch_rows(const RowJob& job, cudaStream_t stream);

/// Largest logit of each sequence and head, from those of the blocks.
struct MaxJob {
  Batch batch;
  int h;
  const float* block_max;  // [h, q blocks]
  float* max_logit;        // [sequences, h]
};
void launch_max(const MaxJob& job, cudaStream_t stream);

}  // namespace sagebwd::cuda::plain
