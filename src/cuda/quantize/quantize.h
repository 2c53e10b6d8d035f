// SPDX-License-Identifier: Apache-2.0
// Kernels that turn the caller's tensors into the workspace formats of host/params.h: means, INT8
// codes (row-major and transposed), padded 16-bit copies, and the statistics of a query.
#pragma once

#include <cuda_runtime_api.h>

#include "cuda/host/params.h"
#include "sagebwd/types.h"

namespace sagebwd::cuda {

/// Mean over the keys of each sequence. Tokens that hold NaN or Inf are left out.
struct MeanJob {
  Sequences seq;
  int d, padded_d, hk, num_blocks;
  Strided x;
  double* part;  // [hk, blocks, D]
  int* tokens;   // [hk, blocks]: tokens in each part
  float* mean;   // [sequences, hk, D]
};
void launch_mean(const MeanJob& job, Dtype dtype, cudaStream_t stream);

/// What every conversion of one tensor needs.
struct TokenJob {
  Sequences seq;
  int d, padded_d, heads, num_blocks;
  int64_t tokens;  // padded total
  Strided x;
  int tokens_per_scale;         // 1, 64 or 128
  int8_t* codes = nullptr;      // [heads, tokens, D]
  int8_t* codes_t = nullptr;    // [heads, tokens / kGroup, D, kGroup]
  bool for_turned = false;      // order of codes_t: tile::turned instead of tile::permuted
  void* raw = nullptr;          // [heads, tokens, D]
  const float* mean = nullptr;  // [sequences, heads, D]: subtracted first (keys and values)
};

struct KeyJob : TokenJob {
  KeyScale* scale;  // [heads, tokens]
};
struct ValueJob : TokenJob {
  float* scale;       // [heads, tokens / tokens_per_scale]; null: copy only
  int64_t raw_tiles;  // leading scale blocks of each sequence that are copied to `raw`
};
struct QueryJob : TokenJob {
  int group;
  float logit_scale;
  const float* k_mean;  // [sequences, heads / group, D]; null: zero
  // Forward: lane and mean_logit. Backward: row (all but delta), with lse given.
  float* lane = nullptr;
  float* mean_logit = nullptr;
  QueryRow* row = nullptr;
  StridedStats lse{};
};
struct DoutJob : TokenJob {
  Strided o;
  StridedStats dlse;
  QueryRow* row;  // lane and lse2 are there already; delta is added
  QueryExponent* exponent;
  QueryGradient* gradient;
};
void launch_keys(const KeyJob& job, Dtype dtype, cudaStream_t stream);
void launch_values(const ValueJob& job, Dtype dtype, cudaStream_t stream);
void launch_queries(const QueryJob& job, Dtype dtype, cudaStream_t stream);
void launch_dout(const DoutJob& job, Dtype dtype, cudaStream_t stream);

/// Writes documents first … first + count - 1 of a packed batch. The table travels by value, so
/// nothing has to outlive the call and a captured graph keeps its own copy.
inline constexpr int kDocumentsPerLaunch = 240;
struct DocumentChunk {
  DocumentStart start[kDocumentsPerLaunch];
};
void launch_documents(const DocumentChunk& chunk, DocumentStart* to, int count,
                      cudaStream_t stream);

/// Order-preserving codes of floats back to floats: 0 (nothing seen) is -inf.
void launch_decode_max(const uint32_t* codes, float* out, int64_t count, cudaStream_t stream);

}  // namespace sagebwd::cuda
