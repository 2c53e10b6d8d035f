// SPDX-License-Identifier: Apache-2.0
// The structs that cross from host to device. Every pointer is device memory, with its shape.
//
// Everything is cut into blocks of kBlock tokens, whatever the recipe's tiles: a tile is one to
// four blocks, and the last block of a sequence may be short. Blocks are numbered through all
// sequences of a call. Arrays of tokens have no padding: token i of sequence s lies at s.q_first +
// i. Rows of codes and values are `pitch` channels apart (those of V and dO `value_pitch`);
// channels beyond the head dim are zero.
#pragma once

#include <cstdint>

#include "cuda/plain/lists.h"
#include "cuda/tile/sequences.h"
#include "cuda/tile/views.h"
#include "numerics/softcap.h"
#include "sagebwd/recipe.h"
#include "sagebwd/types.h"

namespace sagebwd::cuda::plain {

inline constexpr int kBlock = 64;
static_assert(kBlock == kListedQueries);

/// What every kernel of a call knows of it.
struct Batch {
  Sequences seq;
  int64_t q_blocks, k_blocks;  // of all sequences
  Dtype dtype;                 // of the caller's tensors
};

/// Q, K, V or dO as the products want it.
struct Operand {
  int8_t* codes;  // [heads, tokens, its pitch]
  float* scale;   // [heads, tokens]: of the codes; NaN for a token that holds NaN or Inf
  float* values;  // [heads, tokens, its pitch]: FP32, in `paper` K without its mean; null where no
                  // product needs it
  int* poisoned;  // [heads, blocks]: whether the block's values hold NaN or Inf
};

/// The centres of K or V in recipe `vectorwise` (numerics/octaves.h). They lie as in the saved
/// codes: a row per block of kKeysPerScale keys, of which the first block of an octave has the
/// octave's centre.
struct Centres {
  int8_t* codes;       // [hk, key_blocks, d]; null: there are none
  float* scale;        // [hk, key_blocks]
  int64_t key_blocks;  // of all sequences, or more
  Sequences blocks;    // the sequences cut into such blocks
};

/// What forward and backward kernels share.
struct Params {
  Batch batch;
  MaskParams mask;
  int h, hk, group;
  int d, pitch;              // of Q and K
  int value_d, value_pitch;  // of V, O and dO
  int64_t tq, tk;            // tokens of all sequences
  int tile_q, tile_k;
  Scheme scheme;
  uint32_t dithered;  // Matmul bits
  uint64_t seed;
  uint32_t lifted;  // Matmul bits
  float scale;      // of the logits
  numerics::Softcap cap;
  float p_levels;     // of the codes of P
  bool exact_inputs;  // values of V and dO have 11 significant bits or fewer
  // V has a scale per token, which is folded into P, and dP is made from its codes. A value that
  // holds NaN or Inf has codes 0, and the rows that see it become NaN. Elsewhere its tile runs in
  // floating point.
  bool folds_v;
  Operand q, k, v;      // v in the backward: codes if folds_v, else values
  Centres v_centres;    // what codes of V lack
  const float* q_mean;  // [h, q blocks, d] of the block's tile; null: no Q-smoothing
  // What logits of codes lack. [h, tq]: scale·q·mean(K); null in `vectorwise`.
  const float* mean_logit;
  // [octaves, h, tq]: what the centre of a key's octave adds, in log2 units; null in `paper` and
  // where S is lifted.
  const float* centre_logit;
  ListBits lists;  // listed null: none
};

struct ForwardParams : Params {
  Strided o;
  StridedStats lse;
  float* block_max;  // [h, q blocks]: largest logit
};

struct BackwardParams : Params {
  Operand dout;
  const float* lse2;  // [h, tq]: log2 of Σ 2^logit over keys; -inf: the row has no keys
  // [h, tq]: D - dLSE. Where V has centres [octaves, h, tq], less what that of a key's octave adds
  // to dP.
  const float* delta;
  const float* turned_mean;  // q_mean rotated as the codes of Q are
  // K as dQ takes it: in `paper` the codes of S, in `vectorwise` others that are made from them
  // (centres.h); and what it lacks, [sequences, hk, d], null: nothing.
  Operand dq_k;
  const float* dq_mean;
  // Gradients of rotated Q and K before they are turned back, [heads, tokens, d]; null where the
  // codes are not of rotated tensors or are not used. They may share memory.
  float *dq_rows, *dk_rows;
  float* row_sum;  // [h, tq]: of dS, for dq_rows
  StridedStats dlse;
  bool partial_kv;
  bool sums_what_cap_takes;  // spec::Problem
  Strided dq, dk, dv;
};

}  // namespace sagebwd::cuda::plain
