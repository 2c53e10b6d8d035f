// SPDX-License-Identifier: Apache-2.0
// The kernel that makes all operands of a call.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "cuda/sm80/formats.h"
#include "cuda/tuned/operands.h"
#include "sagebwd/recipe.h"
#include "sagebwd/types.h"

namespace sagebwd::cuda::sm80 {

using tuned::Item, tuned::MeanJob;

/// Everything that a forward or a backward needs before its main kernel. Outputs that are null are
/// not made.
struct OperandJob : tuned::OperandJob {
  int q_tokens, k_tokens;  // that share a scale in `paper`
  Scheme scheme;
  bool k_per_token;  // in `vectorwise`: K has a scale per token, else per kBlock keys
  bool folds_v;      // V's token scale is folded into P, and dP is made from the codes of V

  // V in 16 bit, [hk, tk, D]. Forward: V itself if v16_is_v, else codes if tiles lead, and V
  // itself of poisoned tiles. Backward: codes if folds_v, else V itself.
  void* v16 = nullptr;

  // Forward.
  TileScale* tile_scale = nullptr;  // [hk, tk / tile_k]
  int tile_k;
  FoldedScales* folded = nullptr;  // [hk, tk / kBlock]
  bool v16_is_v;
  bool leads;  // any tile may be one of a leading entry of a list

  // Backward.
  int8_t* k8t = nullptr;     // [hk, tk / kSlab, D, kSlab], in the order of tile::turned
  float* v_scale = nullptr;  // [hk, tk]: NaN for a poisoned token
  Strided o, dout;
  StridedStats lse, dlse;   // dlse.data null: none
  int8_t *q8t, *do8t;       // [h, tq / kSlab, D, kSlab]
  void* do16 = nullptr;     // [h, tq, D]
  QueryRow* row;            // [h, tq]
  QueryExponent* exponent;  // [h, tq]
  QueryGradient* gradient;  // [h, tq]
  float* dq_sum = nullptr;  // [h, tq, D], set to zero
  bool capped = false;      // logits have the mean key's before they are capped, and so has LSE
};

void launch_operands(const OperandJob& job, Dtype dtype, cudaStream_t stream);

}  // namespace sagebwd::cuda::sm80
