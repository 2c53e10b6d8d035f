// SPDX-License-Identifier: Apache-2.0
// Which sequence a block belongs to, which keys a query sees, and the caller's elements.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include "cuda/plain/params.h"

namespace sagebwd::cuda::plain {

struct Sequence {
  int index;
  int64_t batch, q_begin, k_begin;  // in the caller's tensors
  int64_t q_first, k_first;         // in arrays of tokens
  int64_t q_block, k_block;         // first block
  int64_t nq, nk;
};

__device__ inline int64_t blocks_of(int64_t tokens) { return (tokens + kBlock - 1) / kBlock; }

__device__ inline Sequence sequence_at(const Sequences& s, int i) {
  if (s.documents == nullptr)
    return {i, i, 0, 0, i * s.nq, i * s.nk, i * blocks_of(s.nq), i * blocks_of(s.nk), s.nq, s.nk};
  const DocumentStart a = s.documents[i], b = s.documents[i + 1];
  return {i, 0, a.q, a.k, a.q, a.k, a.q_block, a.k_block, b.q - a.q, b.k - a.k};
}

/// The sequence that holds a block of queries (or of keys).
__device__ inline Sequence sequence_of_block(const Sequences& s, int64_t block, bool queries) {
  if (s.documents == nullptr)
    return sequence_at(s, static_cast<int>(block / blocks_of(queries ? s.nq : s.nk)));
  int low = 0, high = s.count;  // the last document that starts at or before the block
  while (high - low > 1) {
    const int mid = (low + high) / 2;
    const DocumentStart d = s.documents[mid];
    (block >= (queries ? d.q_block : d.k_block) ? low : high) = mid;
  }
  return sequence_at(s, low);
}

/// Half-open range of tokens.
struct Range {
  int64_t begin, end;
};

/// Keys that query i sees; both ends grow with i. Empty ranges have begin == end.
__device__ inline Range visible_keys(const Sequences& m, const Sequence& s, int64_t i) {
  const int64_t shift = m.bottom_right ? s.nk - s.nq : 0;
  int64_t end = m.right < 0 ? s.nk : i + shift + m.right + 1;
  end = end < 0 ? 0 : end > s.nk ? s.nk : end;
  int64_t begin = m.left < 0 ? 0 : i + shift - m.left;
  begin = begin < 0 ? 0 : begin > end ? end : begin;
  return {begin, end};
}

__device__ inline int64_t smaller(int64_t a, int64_t b) { return a < b ? a : b; }

/// Keys that at least one query of the block at q0 sees.
__device__ inline Range keys_of_block(const Sequences& m, const Sequence& s, int64_t q0) {
  const Range r{visible_keys(m, s, q0).begin,
                visible_keys(m, s, smaller(q0 + kBlock, s.nq) - 1).end};
  return r.begin < r.end ? r : Range{0, 0};
}

/// Queries that see at least one key of the block at k0.
__device__ inline Range queries_of_block(const Sequences& m, const Sequence& s, int64_t k0) {
  const int64_t shift = m.bottom_right ? s.nk - s.nq : 0;
  const int64_t last = smaller(k0 + kBlock, s.nk) - 1;
  int64_t begin = m.right < 0 ? 0 : k0 - shift - m.right;
  int64_t end = m.left < 0 ? s.nq : last - shift + m.left + 1;
  begin = begin < 0 ? 0 : begin;
  end = end > s.nq ? s.nq : end;
  return begin < end ? Range{begin, end} : Range{0, 0};
}

/// Whether the block at `first` has tokens of the range.
__device__ inline bool overlaps(const Range& r, int64_t first) {
  return r.end > first && r.begin < first + kBlock;
}

/// Element of the first channel of a token.
__device__ inline int64_t offset_of(const Strided& x, const Sequence& s, int head, int64_t token) {
  return s.batch * x.batch + head * x.head + token * x.token;
}
__device__ inline float* stat_of(const StridedStats& x, const Sequence& s, int head,
                                 int64_t token) {
  return x.data + s.batch * x.batch + head * x.head + token * x.token;
}

__device__ inline float read(const Strided& x, int64_t at) {
  switch (x.dtype) {
    case Dtype::bf16:
      return __bfloat162float(static_cast<const __nv_bfloat16*>(x.data)[at]);
    case Dtype::f16:
      return __half2float(static_cast<const __half*>(x.data)[at]);
    case Dtype::f32:
      break;
  }
  return static_cast<const float*>(x.data)[at];
}

__device__ inline void write(const Strided& x, int64_t at, float value) {
  switch (x.dtype) {
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
