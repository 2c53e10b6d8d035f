// SPDX-License-Identifier: Apache-2.0
// What sparse-linear attention has around its two branches: the mix of their outputs, and for the
// router that chooses key blocks the means of blocks and the largest of many scores.
//
//   out = α·sparse + (1 − α)·linear
//
// The caller owns all memory. Calls validate first and throw sagebwd::Error before anything is
// written. Sums are FP32, and their bits do not depend on the number of threads.
#pragma once

#include <cstddef>

#include "sagebwd/types.h"

namespace sagebwd {

/// α, contiguous [batches, h, rows]: a row is for `block` queries of a head.
struct Alpha {
  const float* data = nullptr;
  int64_t batches = 1;  // 1: all batch entries share it
  int64_t rows = 1;
  int64_t block = 1;  // 1 or a multiple of 64
};

/// Where and by what means a call runs.
struct Place {
  Device device = Device::cpu;
  void* workspace = nullptr;  // workspace_size() bytes, aligned for floats
  size_t workspace_bytes = 0;
  ParallelFor parallel_for;
  void* stream = nullptr;  // cudaStream_t for Device::cuda
};

struct MixArgs : Place {
  TensorView sparse;  // [b, h, n, d]
  TensorView linear;  // [b, h, n, d]
  Alpha alpha;
  StatsView norm;  // optional, [b, h, n]: where it is 0, α counts as 1 and `linear` as 0
};

struct MixForwardArgs : MixArgs {
  TensorView out;  // [b, h, n, d], written
};

/// dsparse = α·dout, dlinear = (1 − α)·dout, dα = Σ dout·(sparse − linear)
struct MixBackwardArgs : MixArgs {
  TensorView dout;          // [b, h, n, d]
  TensorView dsparse;       // [b, h, n, d], written
  TensorView dlinear;       // [b, h, n, d], written
  float* dalpha = nullptr;  // optional, like alpha, written
};

/// What the sparse branch has of that: dsparse, and its part of dα. The rest is the business of a
/// linear branch that mixes (LinearBackwardArgs::alpha).
struct MixSparseArgs : Place {
  TensorView sparse;  // [b, h, n, d]; only read for `parts`
  TensorView dout;    // [b, h, n, d]
  Alpha alpha;
  StatsView norm;          // as above
  TensorView dsparse;      // [b, h, n, d], written
  float* parts = nullptr;  // optional, contiguous [b, h, n / 64 rounded up], written: sums of
                           // dout·sparse over 64 queries, without those whose norm is 0
};

/// Means of `block_q` queries and `block_k` keys. The last block of a sequence may be short.
struct BlockMeansArgs : Place {
  TensorView q;  // [b, h,  nq, d]
  TensorView k;  // [b, hk, nk, d]
  int64_t block_q = 128, block_k = 64;
  bool mean_free_keys = true;  // from the means of keys, that of the sequence is subtracted
  float* q_means = nullptr;    // contiguous [b, h,  blocks, d], written
  float* k_means = nullptr;    // contiguous [b, hk, blocks, d], written
};

/// The k largest of each row of scores, largest first. Equal ones come in the order of their
/// places.
struct TopKArgs : Place {
  const float* scores = nullptr;  // contiguous [rows, columns]
  int64_t rows = 0, columns = 0, k = 0;
  int32_t* index = nullptr;  // contiguous [rows, k], written
  int32_t* count = nullptr;  // [rows], written: how many of the k are above -inf
};
/// The most columns on a GPU.
inline constexpr int64_t kMostTopKColumns = 8192;

/// Bytes of workspace a call needs. Validates the arguments (workspace fields and data pointers are
/// not looked at). Other calls need none.
SAGEBWD_API size_t workspace_size(const MixBackwardArgs& args);
SAGEBWD_API size_t workspace_size(const BlockMeansArgs& args);

SAGEBWD_API void mix_forward(const MixForwardArgs& args);
SAGEBWD_API void mix_backward(const MixBackwardArgs& args);
SAGEBWD_API void mix_sparse_backward(const MixSparseArgs& args);
SAGEBWD_API void block_means(const BlockMeansArgs& args);
SAGEBWD_API void top_k(const TopKArgs& args);

}  // namespace sagebwd
