// SPDX-License-Identifier: Apache-2.0
// The kernel that makes all operands of a call.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "cuda/sm80/formats.h"
#include "cuda/tuned/operands.h"
#include "sagebwd/types.h"

namespace sagebwd::cuda::sm80 {

using tuned::Item, tuned::MeanJob;

/// K as dQ is made from it, but in `paper`: one scale per tile of keys, and without the mean of a
/// sample of the sequence, of which the kernel before has made both forms.
struct DqKeys {
  float* scale = nullptr;   // [hk, tk / kSlab], of the tile that holds the slab
  float* turned = nullptr;  // [sequences, hk, D]: the mean, rotated as the codes are
  float* mean = nullptr;    // [sequences, hk, D]
};

/// Everything that a forward or a backward needs before its main kernel. Outputs that are null are
/// not made.
struct OperandJob : tuned::OperandJob {
  // Keys that share a scale: of codes in `paper`, else of the codes that dQ is made from. In
  // `paper`, queries that do.
  int q_tokens, k_tokens;
  bool paper;
  bool folds_v;  // V's token scale is folded into P, and dP is made from the codes of V

  // V in 16 bit, [hk, tk, D]. Forward: V itself if v16_is_v, codes if tiles lead, and V itself of
  // poisoned tiles in `paper`. Backward: codes if folds_v, else V itself.
  void* v16 = nullptr;

  // [hk, tk]: NaN for a poisoned token. In the forward, of blocks that have one.
  float* v_scale = nullptr;

  // Forward.
  float* v_tile_scale = nullptr;  // [hk, tk / tile_k]
  int tile_k;
  FoldedScales* folded = nullptr;  // [hk, tk / kBlock]
  bool v16_is_v;
  bool leads;  // any tile may be one of a leading entry of a list

  // Backward.
  int8_t* k8t = nullptr;  // [hk, tk / kSlab, D, kSlab], in the order of tile::turned
  DqKeys dq_keys;         // not in `paper`
  Strided o, dout;
  StridedStats lse, dlse;         // dlse.data null: none
  int8_t *q8t, *do8t;             // [h, tq / kSlab, D, kSlab]
  void* do16 = nullptr;           // [h, tq, D]
  QueryRow* row;                  // [h, tq]
  QueryExponent* exponent;        // [octaves, h, tq]; in `paper` and with a cap [h, tq]
  QueryGradient* gradient;        // [octaves, h, tq]; where V has no codes [h, tq]
  float* dq_sum = nullptr;        // [h, tq, D], set to zero
  float* centre_logit = nullptr;  // [octaves, h, tq], in log2 units; with a cap, which comes after
};

/// The means of DqKeys, from the centres and the keys, or from saved codes.
void launch_dq_means(const OperandJob& job, Dtype dtype, cudaStream_t stream);

void launch_operands(const OperandJob& job, Dtype dtype, cudaStream_t stream);

}  // namespace sagebwd::cuda::sm80
