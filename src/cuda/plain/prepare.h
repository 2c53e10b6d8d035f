// SPDX-License-Identifier: Apache-2.0
// From the caller's tensors to the arrays of params.h: the mean key, codes with their scales, FP32
// copies, and what each query carries.
#pragma once

#include <cuda_runtime_api.h>

#include "cuda/plain/params.h"

namespace sagebwd::cuda::plain {

/// The mean key of each sequence (`paper`). Keys that hold NaN or Inf are left out.
struct MeanJob {
  Batch batch;
  int heads, d;
  Strided k;
  double* part;  // [heads, k blocks, d]
  int* counted;  // [heads, k blocks]: tokens in each part
  float* mean;   // [sequences, heads, d]
};
void launch_mean(const MeanJob& job, cudaStream_t stream);

/// Which tokens share a scale.
enum class ScaleOf {
  run,    // those of a run
  token,  // none
  key,    // none: K in `vectorwise`, rounded up
  value,  // none: V in `vectorwise`, with a floor
};

/// Codes, scales and copies of one tensor. Whatever is null is not made.
struct TokenJob {
  Batch batch;
  bool queries;  // whether the tokens are queries or keys
  int heads, d, pitch;
  int64_t tokens;
  Strided x;
  const float* mean;  // [sequences, heads, d]: subtracted first; null: none
  Centres centres;    // subtracted last, after the rotation
  int run;            // tokens that share a mean or a scale: a multiple of kBlock up to 256
  ScaleOf scale_of;
  float* run_mean;     // [heads, blocks, d]: mean of the run, subtracted before quantisation
  bool rotate;         // quantise the rotated tensor
  float* turned_mean;  // [heads, blocks, d]: run_mean rotated
  Operand to;
};
void launch_tokens(const TokenJob& job, cudaStream_t stream);

struct RowJob {
  Batch batch;
  int h, group, d, value_d;
  int64_t tq;
  float scale;
  bool capped;          // logits have the mean key's, and lse2 too
  Strided q;            // data null: there is no mean_logit
  const float* k_mean;  // [sequences, h / group, d] or null
  float* mean_logit;    // null: logits lack nothing
  // Backward only: lse2 is null in the forward.
  float *lse2, *delta;  // delta: [octaves, h, tq] where V has centres
  Centres v_centres;
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
