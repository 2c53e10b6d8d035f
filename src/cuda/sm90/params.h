// SPDX-License-Identifier: Apache-2.0
// The parameters of the main kernels. Every pointer is device memory, with its shape.
//
// In the workspace sequences follow one another, each padded to whole blocks of kBlock tokens, tq
// and tk tokens in all. D is 64 or 128.
#pragma once

#include <cuda.h>
#include <cuda_fp16.h>

#include <cstdint>

#include "cuda/lists/lists.h"
#include "cuda/sm90/formats.h"
#include "cuda/tile/layout.h"
#include "cuda/tile/sequences.h"
#include "cuda/tile/views.h"
#include "cuda/tuned/divisor.h"

namespace sagebwd::cuda::sm90 {

struct ForwardParams {
  CUtensorMap q8;   // [h·tq, D]
  CUtensorMap k8;   // [hk·tk, D]
  CUtensorMap v8t;  // [hk·tk / kSlab·D, kSlab]
  Sequences seq;
  MaskParams mask;
  int h, group;
  int q_blocks;        // of all sequences
  int heads_together;  // whose pieces of work are done side by side
  int64_t tq, tk;
  const float* logit_factor;  // [h, tq]: scale of Q times c·log2e
  CUtensorMap centre8;        // [sequences·hk·kCentreRows, D]
  const float* centre_scale;  // [sequences, hk, kCentreRows]
  // Centres of V: bf16, [sequences·hk·D, kCentreRows], and [sequences, hk, kCentreRows].
  CUtensorMap value_centres;
  const float* value_centre_scale;
  const KeyNumbers* numbers;  // [hk, tk / kBlock]
  Strided o;
  bool o_chunks;  // rows of O start at multiples of 16 bytes
  StridedStats lse;
  uint32_t* max_logit;  // [sequences, h] in order-preserving code, or null
  uint32_t* next;       // the next piece of work; 0 at the start
};

/// Of the forward with block lists.
struct ListedParams : ForwardParams {
  KeyLists lists;     // of kBlock queries each
  bool whole_stages;  // their tiles have 128 keys, else 64
};

struct BackwardParams {
  CUtensorMap q8;   // [h·tq, D]
  CUtensorMap q8t;  // [h·tq / kSlab·D, kSlab]
  // dO in 16 bit: the caller's, by tokens of a head, or a copy, [h·tq, D].
  CUtensorMap do16;
  bool do16_is_given;
  tuned::Divisor heads_of_rows;  // by tq: from a row of the workspace to its head
  CUtensorMap do8t;              // [h·tq / kSlab·D, kSlab]
  CUtensorMap k8;                // [hk·tk, D]
  Sequences seq;
  MaskParams mask;
  int hk, group;
  int k_blocks;     // of all sequences
  int mixed_heads;  // that are visited side by side at the end, of all sequences; 0: none
  int parted;       // blocks of keys, the last ones, whose walk several thread blocks share
  int parts;        // how many these are
  int64_t tq, tk;
  const QueryStats* stats;  // [h, tq / kSlab]
  const float* k_scale;     // [hk, tk]
  const int8_t* v8;         // [hk, tk, D]
  const float* v_scale;     // [hk, tk]
  int rotation;             // channels that the rotation of Q and K mixes; 0: none
  const uint32_t* k_top;    // [sequences, hk]: bits of the largest scale of K
  const float* dq_lift;     // [h, tq]
  // [h, tq / 16, D / 8, 128], or halves, [h, tq / 16, D / 16, 256] (tuned/query_sums.h).
  void* dq_sum;
  bool dq_halves;
  Strided dk, dv;
  bool dk_chunks, dv_chunks;  // rows start at multiples of 16 bytes
  uint32_t* tickets;          // the next thread block's keys; 0 at the start
  uint32_t* turns;            // [h, tq / 16]: thread blocks that have added to these sums of dQ,
                              // 0 at the start; null: they add in any order
  float* part_sums;           // [parted, parts, keys, D]: dV and dK (bwd/parts.cuh)
  uint32_t* parts_done;       // [parted, parts, consumers], 0 at the start
  float* row_sum;  // [h, tq]: row sums of dS in the units of dQ (kDqUnit), 0 at the start;
                   // null: unwanted
  const OctaveStats* octave_stats;  // [octaves, h, tq / kSlab]; the stride of an octave is below
  int64_t slabs;                    // of all heads: h·tq / kSlab
  // Centres as they are saved, in the rows of the octaves' first blocks.
  const int8_t* centre8;      // [hk, key_blocks, D]
  const float* centre_scale;  // [hk, key_blocks]
  int64_t key_blocks;
  const float* dq_mean;  // [sequences, hk, D]: what the operand of dQ lacks, rotated
};

}  // namespace sagebwd::cuda::sm90
