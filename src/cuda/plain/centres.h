// SPDX-License-Identifier: Apache-2.0
// What rounds keys and values of recipe `vectorwise` and knows more than one key: the centres,
// their part of the logits, and the keys that dQ takes.
#pragma once

#include <cuda_runtime_api.h>

#include "cuda/plain/params.h"

namespace sagebwd::cuda::plain {

/// Codes and scales of the centres of K or V.
struct CentreJob {
  Batch batch;
  int heads, d;
  Strided x;
  bool of_values;       // of V
  bool smooth, rotate;  // smooth: else all of them are zero
  int64_t blocks;       // of kKeysPerScale keys, of all sequences
  Centres to;
};
void launch_centres(const CentreJob& job, cudaStream_t stream);

/// Logits of the centres, in log2 units.
struct CentreLogitJob {
  Batch batch;
  int h, group, d, pitch;
  int64_t tq;
  float scale;  // of the logits
  Operand q;
  Centres centres;
  float* to;  // [octaves, h, tq]
};
void launch_centre_logits(const CentreLogitJob& job, cudaStream_t stream);

/// K for dQ, made again from its codes: without the mean key of each sequence and with one scale
/// for a tile of keys, because a scale per key would have to be folded into dS. What rounds it may
/// lie ahead of it: no later forward depends on that.
struct DqKeysJob {
  Batch batch;
  int heads, d, pitch;
  int64_t tokens;
  int tile;  // keys: kBlock or twice that
  bool rotated;
  Operand k;
  Centres centres;
  float* turned_mean;  // [sequences, heads, d]: mean of the keys as their codes have them
  float* mean;         // the same as the caller has them
  Operand to;          // codes and scale
};
void launch_dq_keys(const DqKeysJob& job, cudaStream_t stream);

}  // namespace sagebwd::cuda::plain
