// SPDX-License-Identifier: Apache-2.0
// The kernels of sagebwd/mix.h. All are bound by memory: tensors are read once and in place.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "cuda/tile/views.h"
#include "sagebwd/types.h"

namespace sagebwd::cuda::sla2::mix {

/// Tokens of a head that a thread block takes; blocks of α are 1 or a multiple of it.
inline constexpr int kPiece = 64;

struct Kind {
  Dtype dtype;
  int d;
  cudaStream_t stream;
};

struct MixJob {
  int batches, heads, tokens, pieces, d;
  const float* alpha;  // [batches or 1, heads, alpha_rows]
  int alpha_rows, alpha_block;
  bool alpha_of_batch;
  StridedStats norm;  // data null: none
  Strided sparse, linear;
  Strided out;                     // forward
  Strided dout, dsparse, dlinear;  // backward; linear and dlinear with data null: counts as 0, not
                                   // wanted
  float* dalpha;  // parts: of tokens [batches, heads, tokens] if alpha_block is 1, else of pieces
                  // [batches, heads, pieces]; null: not wanted
};
void launch_forward(const Kind& kind, const MixJob& job);
void launch_backward(const Kind& kind, const MixJob& job);

/// Adds up parts to the form of α, in order.
struct AlphaSumsJob {
  const float* parts;  // [batches, heads, of_head]
  float* dalpha;       // [1 or batches, heads, rows]
  int64_t results;
  int heads, rows;
  int batches;          // that share a result
  int of_row, of_head;  // parts
};
void launch_alpha_sums(const AlphaSumsJob& job, cudaStream_t stream);

/// Means of blocks of q and k.
struct MeansJob {
  struct Of {
    Strided x;
    int heads, tokens, block, blocks;
    float* means;  // [batches, heads, blocks, d]
  } of[2];
  int batches, d;
};
void launch_means(const Kind& kind, const MeansJob& job);

/// Subtracts the mean of the sequence from means of blocks.
struct CentreJob {
  const float* from;  // [heads, blocks, d]
  float* to;
  int heads, blocks, d, block, tokens;
};
void launch_centre(const CentreJob& job, cudaStream_t stream);

/// The k largest of each row.
struct TopKJob {
  const float* scores;  // [rows, columns]
  int rows, columns, k;
  int32_t *index, *count;  // [rows, k], [rows]
};
void launch_top_k(const TopKJob& job, cudaStream_t stream);

}  // namespace sagebwd::cuda::sla2::mix
