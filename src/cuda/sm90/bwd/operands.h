// SPDX-License-Identifier: Apache-2.0
// What the backward makes of saved codes, dO and O before its main kernel, in two or three
// launches: the largest scales of K and V; padded copies of the codes of K and V, unless they serve
// where they are; and all that follows from queries.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "cuda/sm90/formats.h"
#include "cuda/tuned/operands.h"
#include "sagebwd/types.h"

namespace sagebwd::cuda::sm90 {

/// Every pointer is device memory, with its shape. D is the head dimension: there is no other.
struct BackwardJob {
  Sequences seq;
  int d, h, hk, group, k_blocks;
  int64_t tq, tk;  // padded totals
  tuned::Zeros zeros;
  tuned::SavedCodes saved;
  Strided o, dout;
  StridedStats lse, dlse;  // dlse.data null: none
  float logit_scale;

  // Of keys.
  // [sequences, hk]: bits of the largest scales of V with its centre, and of K.
  uint32_t *v_top, *k_top;
  // The codes of K and V serve where they are saved, and need no copies: nothing is packed, and no
  // token is padding.
  bool keys_are_ready;
  int8_t *k8, *v8;           // [hk, tk, D]
  float *k_scale, *v_scale;  // [hk, tk]

  // Of queries.
  int8_t* q8;          // [h, tq, D]; null: the saved codes serve
  int8_t *q8t, *do8t;  // [h, tq / kSlab, D, kSlab]
  void* do16;          // [h, tq, D]; null: unwanted
  QueryRow* row;       // [h, tq]
  QueryStats* stats;   // [h, tq / kSlab]
  float* dq_lift;      // [h, tq]: what the sums of dQ are multiplied by, a power of two
  void* dq_sum;        // [h, tq, D], set to zero
  bool dq_halves;      // its numbers have 16 bits

  // Of centres and means.
  const int8_t* centre8;      // saved: [hk, key_blocks, D]
  const float* centre_scale;  // saved: [hk, key_blocks]
  const int8_t* v_centre8;    // the same of V
  const float* v_centre_scale;
  float* dq_mean;             // [sequences, hk, D]: what the operand of dQ lacks
  float* dq_mean_back;        // the same, with the rotation turned back
  int rotation;               // channels that the rotation of Q and K mixes; 0: none
  OctaveStats* octave_stats;  // [octaves, h, tq / kSlab]
};

void launch_operands(const BackwardJob& job, Dtype dtype, cudaStream_t stream);

}  // namespace sagebwd::cuda::sm90
