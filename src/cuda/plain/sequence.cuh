// SPDX-License-Identifier: Apache-2.0
// Where the tokens of a sequence lie, and the caller's elements.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include "cuda/plain/params.h"
#include "cuda/tile/sequence.cuh"

namespace sagebwd::cuda::plain {

/// A sequence, and its place in arrays of tokens, which have no padding, and in arrays of blocks.
struct Sequence : tile::Sequence {
  int64_t q_first, k_first;
  int64_t q_block, k_block;
};

__device__ inline Sequence placed(const Sequences& all, const tile::Sequence& s) {
  return {s, s.batch * all.nq + s.q_begin, s.batch * all.nk + s.k_begin, s.q_pad / kBlock,
          s.k_pad / kBlock};
}
__device__ inline Sequence sequence_at(const Sequences& all, int index) {
  return placed(all, tile::sequence_at<kBlock>(all, index));
}
/// The sequence that holds a block of queries (or of keys).
__device__ inline Sequence sequence_of_block(const Sequences& all, int64_t block, bool queries) {
  return placed(all, tile::sequence_of_block<kBlock>(all, static_cast<int>(block), queries));
}

/// Whether queries from q0 on list the keys from k0 on; those of a tile all do or none do.
__device__ inline bool has_bit(const Params& p, const uint32_t* bits, const Sequence& s, int head,
                               int q0, int k0) {
  const int64_t row = head * p.batch.q_blocks + s.q_block + q0 / kBlock,
                bit = s.k_block + k0 / kBlock;
  return (bits[row * p.lists.words + bit / 32] >> (bit % 32) & 1) != 0;
}

__device__ inline int blocks_of(int tokens) { return (tokens + kBlock - 1) / kBlock; }

__device__ inline float read(Dtype dtype, const Strided& x, int64_t at) {
  switch (dtype) {
    case Dtype::bf16:
      return __bfloat162float(static_cast<const __nv_bfloat16*>(x.data)[at]);
    case Dtype::f16:
      return __half2float(static_cast<const __half*>(x.data)[at]);
    case Dtype::f32:
      break;
  }
  return static_cast<const float*>(x.data)[at];
}

__device__ inline void write(Dtype dtype, const Strided& x, int64_t at, float value) {
  switch (dtype) {
    case Dtype::bf16:
      static_cast<__nv_bfloat16*>(x.data)[at] = __float2bfloat16_rn(value);
      return;
    case Dtype::f16:
      static_cast<__half*>(x.data)[at] = __float2half_rn(value);
      return;
    case Dtype::f32:
      break;
  }
  static_cast<float*>(x.data)[at] = value;
}

}  // namespace sagebwd::cuda::plain
