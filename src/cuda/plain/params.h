// SPDX-License-Identifier: Apache-2.0
// The structs that cross from host to device. Every pointer is device memory, with its shape.
//
// Everything is cut into blocks of kBlock tokens, whatever the recipe's tiles: a tile is one to
// four blocks, and the last block of a sequence may be short. Blocks are numbered through all
// sequences of a call. Arrays of tokens have no padding: token i of sequence s lies at s.q_first +
// i. Rows of codes and values are `pitch` channels apart; channels beyond the head dim are zero.
#pragma once

#include <cstdint>

#include "sagebwd/types.h"

namespace sagebwd::cuda::plain {

inline constexpr int kBlock = 64;

/// Where one document of a packed batch starts; an array of these has one entry more than there are
/// documents.
struct DocumentStart {
  int32_t q, k;              // tokens
  int32_t q_block, k_block;  // blocks
};

/// All sequences of a call, and the mask inside each. Query i sees keys i + shift - left … i +
/// shift
/// + right; -1: open. shift = nk - nq if bottom_right.
struct Sequences {
  int count;
  int64_t nq, nk;                            // of each sequence, when not packed
  int64_t q_blocks, k_blocks;                // of all sequences
  const DocumentStart* documents = nullptr;  // [count + 1]; null: not packed
  bool bottom_right;
  int64_t left, right;
};

/// A tensor of the caller's, [b, h, n, d] with unit channel stride.
struct Strided {
  void* data;
  int64_t batch, head, token;  // strides in elements
  Dtype dtype;
};

/// FP32 statistics of the caller's, [b, h, n]; data may be null.
struct StridedStats {
  float* data;
  int64_t batch, head, token;
};

/// Q, K, V or dO as the products want it.
struct Operand {
  int8_t* codes;  // [heads, tokens, pitch]
  float* scale;   // [heads, tokens]: of the codes; NaN for a token that holds NaN or Inf
  float* values;  // [heads, tokens, pitch]: FP32, K and (in the forward) V without their mean; null
                  // where no product needs it
  int* poisoned;  // [heads, blocks]: whether the block's values hold NaN or Inf
};

/// What forward and backward kernels share.
struct Params {
  Sequences seq;
  int h, hk, group, d, pitch;
  int64_t tq, tk;  // tokens of all sequences
  int tile_q, tile_k;
  bool paper, dither;
  bool exact_inputs;  // values of V and dO have 11 significant bits or fewer
  uint64_t seed;
  uint32_t lifted;  // Matmul bits
  float scale;      // of the logits
  float p_levels;   // of the codes of P
  Operand q, k;
  const float* q_mean;       // [h, q blocks, d] of the block's tile; null: no Q-smoothing
  const float* k_mean;       // [sequences, hk, d]; null: no K-smoothing
  const double* mean_logit;  // [h, tq]: scale·q·mean(K)
};

struct ForwardParams : Params {
  Operand v;
  const float* v_scale;  // [hk, k blocks]: of the block's tile; NaN if the tile is poisoned
  const float* v_mean;   // [sequences, hk, d]; null: no V-smoothing
  int64_t pv_floating_tiles;
  Strided o;
  StridedStats lse;
  float* block_max;  // [h, q blocks]: largest logit
};

struct BackwardParams : Params {
  Operand v, dout;     // v: values only
  const float* lse2;   // [h, tq]: log2 of Σ 2^logit over keys; -inf: the row has no keys
  const float* delta;  // [h, tq]
  StridedStats dlse;
  bool partial_kv;
  Strided dq, dk, dv;
};

}  // namespace sagebwd::cuda::plain
