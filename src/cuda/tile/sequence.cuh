// SPDX-License-Identifier: Apache-2.0
// Which sequence a block of the padded token axis belongs to, and which keys its queries see.
#pragma once

#include "cuda/tile/sequences.h"
#include "cuda/tile/views.h"

namespace sagebwd::cuda::tile {

struct Sequence {
  int index;
  int64_t batch, q_begin, k_begin;  // in the caller's tensors
  int64_t q_pad, k_pad;             // first token in the workspace
  int nq, nk;
};

/// kBlock: tokens of a block.
template <int kBlock>
__device__ inline Sequence sequence_at(const Sequences& s, int index) {
  if (s.documents == nullptr)
    return {index,
            index,
            0,
            0,
            static_cast<int64_t>(index) * s.q_blocks * kBlock,
            static_cast<int64_t>(index) * s.k_blocks * kBlock,
            static_cast<int>(s.nq),
            static_cast<int>(s.nk)};
  const DocumentStart a = s.documents[index], b = s.documents[index + 1];
  return {index,
          0,
          a.q,
          a.k,
          static_cast<int64_t>(a.q_block) * kBlock,
          static_cast<int64_t>(a.k_block) * kBlock,
          b.q - a.q,
          b.k - a.k};
}

/// The sequence that holds a block of queries (or of keys).
template <int kBlock>
__device__ inline Sequence sequence_of_block(const Sequences& s, int block, bool queries) {
  if (s.documents == nullptr)
    return sequence_at<kBlock>(s, block / (queries ? s.q_blocks : s.k_blocks));
  int low = 0, high = s.count;  // the last document that starts at or before the block
  while (high - low > 1) {
    const int mid = (low + high) / 2;
    const DocumentStart d = s.documents[mid];
    (block >= (queries ? d.q_block : d.k_block) ? low : high) = mid;
  }
  return sequence_at<kBlock>(s, low);
}

/// The mask as a band of the score matrix: query i sees key j when begin <= j - i < end, and both
/// are inside the sequence. 32 bits, because the inner loops ask for every score.
struct Band {
  int begin, end;
  __device__ uint32_t width() const { return static_cast<uint32_t>(end - begin); }
};
__device__ inline Band band_of(const MaskParams& m, const Sequence& s) {
  constexpr int64_t kFar = int64_t{1} << 29;  // no sequence is longer
  const int64_t shift = m.bottom_right ? s.nk - s.nq : 0;
  const int64_t begin = m.left < 0 ? -kFar : shift - m.left,
                end = m.right < 0 ? kFar : shift + m.right + 1;
  return {static_cast<int>(begin < -kFar ? -kFar : begin), static_cast<int>(end > kFar    ? kFar
                                                                            : end < -kFar ? -kFar
                                                                                          : end)};
}

/// Tokens begin … end - 1 of a sequence.
struct Range {
  int begin, end;
};
using KeyRange = Range;
using QueryRange = Range;

/// Keys that query i sees; begin <= end, both inside the sequence.
__device__ inline KeyRange visible(const MaskParams& m, const Sequence& s, int i) {
  const int64_t shift = m.bottom_right ? s.nk - s.nq : 0;
  int64_t end = m.right < 0 ? s.nk : i + shift + m.right + 1;
  end = end < 0 ? 0 : end > s.nk ? s.nk : end;
  int64_t begin = m.left < 0 ? 0 : i + shift - m.left;
  begin = begin < 0 ? 0 : begin > end ? end : begin;
  return {static_cast<int>(begin), static_cast<int>(end)};
}

/// Queries that see at least one of the keys first … last.
__device__ inline QueryRange visible_to(const MaskParams& m, const Sequence& s, int first,
                                        int last) {
  const int64_t shift = m.bottom_right ? s.nk - s.nq : 0;
  int64_t begin = m.right < 0 ? 0 : first - shift - m.right;
  int64_t end = m.left < 0 ? s.nq : last - shift + m.left + 1;
  begin = begin < 0 ? 0 : begin;
  end = end > s.nq ? s.nq : end;
  return {static_cast<int>(begin < end ? begin : 0), static_cast<int>(begin < end ? end : 0)};
}

/// Elements before the first channel of a token.
__device__ __forceinline__ int64_t offset_of(const Strided& x, const Sequence& s, int head,
                                             int64_t token) {
  return s.batch * x.batch + head * x.head + token * x.token;
}

template <typename T>
__device__ __forceinline__ T* row_of(const Strided& x, const Sequence& s, int head, int64_t token) {
  return static_cast<T*>(x.data) + offset_of(x, s, head, token);
}

__device__ __forceinline__ float* stat_of(const StridedStats& x, const Sequence& s, int head,
                                          int64_t token) {
  return x.data + s.batch * x.batch + head * x.head + token * x.token;
}

}  // namespace sagebwd::cuda::tile
