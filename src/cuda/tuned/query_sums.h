// SPDX-License-Identifier: Apache-2.0
// From the sums of dQ, which the backward adds up in memory, to the caller's tensor.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "cuda/host/launch.h"
#include "cuda/tile/sequences.h"
#include "cuda/tile/views.h"
#include "cuda/tuned/formats.h"
#include "sagebwd/types.h"

namespace sagebwd::cuda::tuned {

/// Every pointer is device memory, with its shape.
struct QuerySums {
  Sequences seq;
  int d, h, hk, group;
  int64_t tq;
  float scale;
  int rotation;          // channels that the rotation of Q and K mixes; 0: none
  const QueryRow* rows;  // [h, tq]
  // dQ·divisor/c in the order of an accumulator: [h, tq / 16, D / 8, 128] (arch/global_add.cuh);
  // halves: [h, tq / 16, D / 16, 256], eight numbers of a lane together.
  const void* sums;
  bool halves;
  const uint32_t* k_top;  // [sequences, hk]: bits of what sums are multiplied by; null: of 1
  const float* k_mean;    // [sequences, hk, k_mean_d]
  int k_mean_d;
  StridedStats dlse;         // data null: none
  const float* row_sum;      // [h, tq]: row sums of dS·divisor; null: they follow from dLSE
  bool sums_what_cap_takes;  // row_sum is of that (spec::Problem)
  Strided dq;
  bool chunks;  // rows of dQ start at multiples of 16 bytes
};

void launch_query_sums(const QuerySums& sums, Dtype dtype, int padded_d, int q_blocks,
                       cudaStream_t stream, Start start = Start::behind);

}  // namespace sagebwd::cuda::tuned
