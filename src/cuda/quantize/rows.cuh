// SPDX-License-Identifier: Apache-2.0
// How a thread block holds a block of kTokens tokens: D / 8 neighbouring lanes share a token, eight
// channels each.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include "cuda/tile/codes.cuh"
#include "cuda/tile/sequence.cuh"
#include "numerics/quantize.h"

namespace sagebwd::cuda {

__device__ __forceinline__ float as_float(__nv_bfloat16 x) { return __bfloat162float(x); }
__device__ __forceinline__ float as_float(__half x) { return __half2float(x); }

template <int D, int kTokens = kBlock>
struct RowShape {
  static constexpr int kThreads = 4 * D * kTokens / kBlock;
  // Thread blocks on a multiprocessor, at least.
  static constexpr int kResident = (kTokens < kBlock ? 768 : 1024) / kThreads;
  static constexpr int kLanes = D / 8;               // per token
  static constexpr int kRows = kThreads / kLanes;    // tokens per step
  static constexpr int kSteps = kTokens / kRows;
};

/// Eight values of one token.
template <typename T>
struct Chunk {
  uint4 bits;
  __device__ __forceinline__ void unpack(float (&x)[8]) const {
    const T* v = reinterpret_cast<const T*>(&bits);
#pragma unroll
    for (int e = 0; e < 8; ++e) x[e] = as_float(v[e]);
  }
};

template <typename T>
__device__ __forceinline__ Chunk<T> load_chunk(const T* row, int channel, bool vector) {
  Chunk<T> c;
  if (vector) {
    c.bits = *reinterpret_cast<const uint4*>(row + channel);
  } else {
    T* v = reinterpret_cast<T*>(&c.bits);
#pragma unroll
    for (int e = 0; e < 8; ++e) v[e] = row[channel + e];
  }
  return c;
}

/// Reductions over the lanes of one token.
template <int kLanes>
__device__ __forceinline__ float row_max_nan(float x) {
#pragma unroll
  for (int m = 1; m < kLanes; m *= 2) x = arch::max_nan(x, __shfl_xor_sync(0xffffffffu, x, m));
  return x;
}
template <int kLanes>
__device__ __forceinline__ float row_sum(float x) {
#pragma unroll
  for (int m = 1; m < kLanes; m *= 2) x += __shfl_xor_sync(0xffffffffu, x, m);
  return x;
}
template <int kLanes>
__device__ __forceinline__ bool row_any(bool x) {
  const unsigned votes = __ballot_sync(0xffffffffu, x);
  const int first = (threadIdx.x % 32) / kLanes * kLanes;
  return ((votes >> first) & ((1u << kLanes) - 1u)) != 0;
}

}  // namespace sagebwd::cuda
