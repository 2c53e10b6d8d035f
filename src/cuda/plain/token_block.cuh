// SPDX-License-Identifier: Apache-2.0
// Kernels that go token by token: a thread block has a block of one head's tokens, a warp one of
// them.
#pragma once

#include "cuda/plain/sequence.cuh"
#include "numerics/quantize.h"

namespace sagebwd::cuda::plain {

inline constexpr int kTokenThreads = 256;
inline constexpr int kTokenWarps = kTokenThreads / 32;
inline constexpr int kMaxDim = 256;

__device__ inline int warp() { return static_cast<int>(threadIdx.x) / 32; }
__device__ inline int lane() { return static_cast<int>(threadIdx.x) % 32; }

__device__ inline float warp_max(float x) {
  for (int m = 16; m > 0; m /= 2) x = fmaxf(x, __shfl_xor_sync(0xffffffffu, x, m));
  return x;
}
template <typename T>
__device__ T warp_sum(T x) {
  for (int m = 16; m > 0; m /= 2) x += __shfl_xor_sync(0xffffffffu, x, m);
  return x;
}
__device__ inline bool warp_any(bool x) { return __any_sync(0xffffffffu, x) != 0; }

/// Whether the token at `row` holds NaN or Inf; asked by a whole warp.
__device__ inline bool is_poisoned(Dtype dtype, const Strided& x, int64_t row, int d) {
  bool bad = false;
  for (int c = lane(); c < d; c += 32) bad |= !numerics::is_finite(read(dtype, x, row + c));
  return warp_any(bad);
}

/// Largest magnitude of a token in shared memory, NaN if it holds NaN or Inf; asked by a whole
/// warp.
__device__ inline float row_amax(const float* row, int d) {
  float top = 0.0f;
  bool bad = false;
  for (int c = lane(); c < d; c += 32) {
    const float x = fabsf(row[c]);
    bad |= !numerics::is_finite(x);
    top = fmaxf(top, x);
  }
  bad = warp_any(bad);
  top = warp_max(top);
  return bad ? NAN : top;
}

inline dim3 grid_of(int64_t blocks, int heads) {
  return dim3(static_cast<unsigned>(blocks * heads));
}
inline dim3 grid_of(const Batch& batch, bool queries, int heads) {
  return grid_of(queries ? batch.q_blocks : batch.k_blocks, heads);
}

/// Work of one thread block.
struct TokenBlock {
  __device__ TokenBlock(const Batch& batch, bool queries) {
    const int64_t blocks = queries ? batch.q_blocks : batch.k_blocks;
    head = static_cast<int>(blockIdx.x / blocks);
    block = blockIdx.x % blocks;
    at = head * blocks + block;
    s = sequence_of_block(batch.seq, block, queries);
    first = static_cast<int>(block - (queries ? s.q_block : s.k_block)) * kBlock;
    count = queries ? s.nq : s.nk;
    rows = min(kBlock, count - first);
    token = (queries ? s.q_first : s.k_first) + first;
  }
  /// Of a row in arrays [heads, tokens].
  __device__ int64_t place(int64_t tokens, int row) const { return head * tokens + token + row; }

  Sequence s;
  int head, rows;     // rows: tokens the block has
  int64_t block, at;  // number of the block; place in arrays [heads, blocks]
  int first, count;   // first token inside the sequence; tokens of the sequence
  int64_t token;      // first token in arrays of tokens
};

}  // namespace sagebwd::cuda::plain
