// SPDX-License-Identifier: Apache-2.0
// The linear branch (sagebwd/linear.h) as a sequence of kernels. A pass works on some key heads and
// the query heads of their groups; `heads` counts those of one kind in a pass.
//
// With the means v̄ of V and ō of dO, and per block a matrix of averages instead of sums:
//
//   keys      z_j = Σ φ(k)        h_j = Σ φ(k)ᵀ·V − z_j·v̄ᵀ                 launch_block_sums
//   queries   Z_i, H_i = sums over the key blocks that i does not exclude  launch_complement
//             U_i = H_i / Z_i, row by row: what each channel of φ has as an average of V − v̄
//             n = φ(q)·Z_i   u = φ(q)∘Z_i / n   O = v̄ + u·U_i              launch_forward
//   backward  G = dO·U_iᵀ   D = u·G   dq = u∘(G − D) + n·dn·(u − φ)        launch_query_gradients
//   queries   a = φ(q)/n   w_i = Σ a   dz_i = Σ a·(n·dn − D)
//             dH_i = Σ aᵀ·dO − w_i·ōᵀ                                      launch_block_sums
//   keys      W_j, dZ_j, dh_j = sums over the query blocks that do not exclude j
//             X_j = dh_j / W_j                                             launch_complement
//             s = φ(k)·W_j   dV = s·(ō + (φ(k)∘W_j / s)·X_j)
//             dφ = W_j∘((V − v̄)·X_jᵀ + (V − v̄)·ō) + dZ_j                   launch_key_gradients
//             g = φ∘(dφ − φ·dφ)   dK = g − mean of g                       launch_subtract_mean
//
// With α of a mix (launch_forward writes α·O_s + (1 − α)·O), the gradient of O is (1 − α)·dO, row
// by row. All of the backward is linear in the rows of dO, so it takes dO as it is and a = (1 −
// α)·φ(q)/n as the weights of rows: W_j then weighs them in the averages X_j too. dα = Σ dO·O_s − Σ
// dO·O, and dO·O = D + dO·v̄.
//
// Averages do without the range of sums: they are FP16, and so are u and rows of dO and V beside
// them, scaled by powers of two. Sums over a block are BF16, because neighbouring blocks may differ
// by any factor. Without the means, what differs between channels would drown in rounding where V
// or dO has a large mean. φ(k) and a are split in two BF16 numbers. All sums are FP32, and their
// order does not depend on scheduling.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "cuda/host/launch.h"
#include "cuda/tile/views.h"
#include "sagebwd/types.h"

namespace sagebwd::cuda::sla2::linear {

/// Tokens that a thread block takes at once. Blocks of lists are multiples of it.
inline constexpr int kPiece = 64;
/// The tokens of the heads of a pass.
struct Tokens {
  Strided x;
  int64_t first;  // head of the pass, counted over all batch entries
  int of_batch;   // heads of a batch entry
  int count;      // tokens of a head
  int heads;      // of the pass
};

/// What every launch needs to know of the call.
struct Kind {
  Dtype dtype;  // bf16 or f16
  int d;        // 64 or 128
  cudaStream_t stream;
  Start start;  // of all kernels: each waits for those before it, and lets the next one start
};

// --- means ---

/// Sums over parts of the tokens, and their mean for each key head. Tokens that hold NaN or Inf do
/// not count.
struct Mean {
  float* part;    // [key heads, parts, d], times kSmall
  int* counted;   // [key heads, parts]: tokens
  int64_t parts;  // of a key head
  float* mean;    // [key heads, d]
};
inline constexpr float kSmall = 0x1p-12f;  // sums of so many tokens stay finite
int64_t mean_parts(int64_t tokens);

/// Several means at once. Heads of a group have one mean.
struct MeanJob {
  struct Of {
    Tokens x;
    int group;
    Mean mean;
  } of[3];
  int count;
};
void launch_means(const Kind& kind, const MeanJob& job);
/// The mean of parts that another kernel has summed.
void launch_mean_of_parts(const Kind& kind, int key_heads, const Mean& mean);

// --- which blocks see each other ---

/// Bits of blocks that see each other, row by row; zeros behind the last column.
struct Seen {
  const uint32_t* at;  // [key heads, rows, words]
  int64_t words;       // an even number
  int rows, columns;   // of a key head: blocks that get sums, and blocks that have summands
};

/// Rows are blocks of queries, columns blocks of keys. It also clears what later kernels add to, so
/// that nothing else has to be launched for that.
struct SeenJob {
  uint32_t* by_query;  // [heads, rows, words]
  int64_t words;
  int rows, columns;
  const int32_t *index, *count;  // null: nothing is excluded; all of `width`
  int64_t width, stride_batch, stride_head;
  int64_t first;  // head of the pass
  int of_batch, heads;
  void* zeros[4];  // of `zero_words` words each; null: none
  int zero_words;
};
void launch_seen(const Kind& kind, const SeenJob& job);

/// The same bits by blocks of keys. The query heads of a group lie one behind the other.
struct SeenByKeysJob {
  const uint32_t* by_query;  // [key heads, rows, query_words]
  uint32_t* by_key;          // [key heads, columns, words]
  int64_t query_words, words;
  int key_heads, rows, columns;
};
void launch_seen_by_keys(const Kind& kind, const SeenByKeysJob& job);

// --- sums over blocks ---

struct BlockSumsJob {
  Tokens x, b;                  // what φ is made of, and its partner
  const float* x_mean;          // [key heads, d]; null: none
  const float* b_mean;          // [key heads, d]
  int group;                    // heads that share these
  const float *weight, *extra;  // [heads, count]: of φ, and a second partner; null: 1, none
  int block, blocks;            // tokens of a block, blocks of a head
  uint16_t* matrix;             // [heads, blocks, d, d], BF16
  float *sum, *extra_sum;       // [heads, blocks, d] of the weighted φ, and of φ times `extra`
  uint32_t* bad;                // [key heads]: set where a matrix has NaN or Inf
  float* magnitude;             // [key heads]: grows to the largest |matrix| / sum of a block
  int together;                 // blocks that a thread block takes, one after the other
};
void launch_block_sums(const Kind& kind, const BlockSumsJob& job);

/// Sums over the blocks that see each other, as averages.
struct ComplementJob {
  Seen seen;
  int key_heads;
  const uint16_t* matrix;  // of launch_block_sums
  const float* sum[2];     // [1]: null: none
  const float* magnitude;  // [key heads]; averages of averages are not larger
  const uint32_t* bad;
  uint16_t* average;      // [heads, blocks, d, d], FP16, times average_scale(magnitude)
  float* sum_of_seen[2];  // [heads, blocks, d]
};
void launch_complement(const Kind& kind, const ComplementJob& job);

// --- tokens ---

/// What the kernels that own tokens read.
struct Tables {
  int group, block, blocks;
  const uint16_t* average;  // [heads, blocks, d, d]
  const float* sum;         // [heads, blocks, d]
  const float* magnitude;   // [key heads] of averages
  const float* mean;        // [key heads, d] of what is averaged
};

/// α of the queries of a call.
struct Mixing {
  const float* alpha;  // [batch entries or 1, heads of one, rows]; null: no mix
  int rows, block;     // a row is for `block` queries, a multiple of kPiece
  bool of_batch;       // batch entries have their own
};

struct ForwardJob {
  Tokens q;
  Tables keys;
  Strided o;
  StridedStats norm;  // data null: not wanted
  Mixing mix;
  Tokens sparse;  // with a mix
};
void launch_forward(const Kind& kind, const ForwardJob& job);

struct QueryGradientsJob {
  Tokens q, dout;
  Tables keys;
  StridedStats dnorm;  // data null: zeros
  Strided dq;
  float *weight, *extra;  // [heads, count]: 1/n, or (1 − α)/n, and n·dn − D
  Mixing mix;
  Tokens dq_sparse;              // with a mix: added to dq
  const float* parts_of_sparse;  // [heads of the call, pieces] of dα
  float* parts;                  // null: dα is not wanted
};
void launch_query_gradients(const Kind& kind, const QueryGradientsJob& job);

struct KeyGradientsJob {
  Tokens k, v;
  Tables queries;
  const float* extra_sum;        // [heads, blocks, d]: dZ
  const float *k_mean, *v_mean;  // [heads, d]; k_mean null: φ gets K as it is
  Strided dv, dk;
  float* g;                     // [heads, count, d]; null: g goes to dk
  Mean g_mean;                  // its parts are pieces; not written without k_mean
  Tokens dk_sparse, dv_sparse;  // data null: nothing is added to dk and dv
};
void launch_key_gradients(const Kind& kind, const KeyGradientsJob& job);

/// dK = g − mean.
struct SubtractMeanJob {
  Tokens dk;
  const float* g;  // null: dk has it
  const float* mean;
};
void launch_subtract_mean(const Kind& kind, const SubtractMeanJob& job);

}  // namespace sagebwd::cuda::sla2::linear
