// SPDX-License-Identifier: Apache-2.0
// The parameters of the main kernels. Every pointer is device memory, with its shape.
//
// Inside the workspace the tokens of all sequences lie behind one another, each sequence padded to
// whole blocks of kBlock tokens: tq and tk are the padded totals. Channels are padded to D = 64 or
// 128. Padding holds zeros.
#pragma once

#include <cstdint>

#include "cuda/lists/lists.h"
#include "cuda/sm80/formats.h"
#include "cuda/tile/layout.h"
#include "cuda/tile/sequences.h"
#include "cuda/tile/views.h"
#include "cuda/tuned/centres.h"
#include "numerics/softcap.h"

namespace sagebwd::cuda::sm80 {

struct ForwardParams {
  Sequences seq;
  MaskParams mask;
  int d, group;
  int64_t tq, tk;
  const int8_t* q8;              // [h, tq, D]
  const float* logit_factor;     // [h, tq]: scale of Q times c·log2e
  const float* q_mean_logit;     // [h, tq]: c·q·mean(K); `paper`
  const int8_t* k8;              // [hk, tk, D]
  const KeyScale* k_scale;       // [hk, tk]
  tuned::Centres centres;        // not in `paper`
  tuned::Centres value_centres;  // what codes of V lack; codes null: nothing
  const int8_t* v8t;             // [hk, tk / kSlab, D, kSlab]
  // [hk, tk / tile_k]: scales of V in `paper`; else [hk, tk / kBlock]: 1. NaN if V is poisoned.
  const float* v_tile_scale;
  const FoldedScales* folded;  // [hk, tk / kBlock]; not in `paper`
  const float* v_scale;        // [hk, tk], of blocks with a poisoned value; not in `paper`
  const void* v16;  // [hk, tk, D], only of tiles whose P·V is in 16 bit: codes, or V if poisoned
  bool v16_is_v;    // V in all of them
  float p_levels, p_unit;  // of the codes of P, and the inverse of that
  Strided o;
  StridedStats lse;
  uint32_t* max_logit;  // [sequences, h] in order-preserving code, or null
  KeyLists lists;       // rows null: none
  numerics::Softcap cap;
};

struct BackwardParams {
  Sequences seq;
  MaskParams mask;
  int d, h, hk, group;
  int64_t tq, tk;
  float p_unit;       // as in the forward
  const int8_t* q8;   // [h, tq, D]
  const int8_t* q8t;  // [h, tq / kSlab, D, kSlab]
  // [octaves, h, tq]; in `paper` and with a cap [h, tq]
  const QueryExponent* q_exponent;
  const QueryGradient* q_gradient;  // [octaves, h, tq]; where V has no codes [h, tq]
  const int8_t* k8;                 // [hk, tk, D]
  const int8_t* k8t;                // [hk, tk / kSlab, D, kSlab]
  const KeyScale* k_scale;          // [hk, tk]
  const float* dq_scale;            // [hk, tk / kSlab]: of k8t; in `paper` it is k_scale
  const void* v16;                  // [hk, tk, D]; null: V is as the kernel wants it
  const float* v_scale;             // [hk, tk]: v16 holds codes with these scales; null: V itself
  int rotation;                     // channels that the rotation of Q and K mixes; 0: none
  const void* do16;                 // [h, tq, D]; null: so is dO
  Strided v, dout;
  const int8_t* do8t;  // [h, tq / kSlab, D, kSlab]
  // [h, tq / 16, D / 8, 128]: dQ·divisor/c, from zero on (arch/global_add.cuh).
  float* dq_sum;
  float* row_sum;  // [h, tq]: row sums of dS·divisor, zero at the start; null: unwanted
  Strided dk, dv;
  uint64_t seed;         // of the dither of dQ
  bool general = false;  // the instance is one with kGeneral (bwd/fused/code_generation.cuh)
  uint32_t* tickets;     // the next thread block's keys; zero at the start
  uint32_t* turns;   // [h, tq / 32, parts]: thread blocks that have added to a warp's part of dQ,
                     // zero at the start; null: they add in any order
  QueryLists lists;  // entries null: none
  numerics::Softcap cap;
  const float* q_centre_logit;  // [octaves, h, tq], in log2 units; with a cap
  bool sums_what_cap_takes;     // row_sum is of that (spec::Problem)
};

}  // namespace sagebwd::cuda::sm80
