// SPDX-License-Identifier: Apache-2.0
// A block of queries by a block of keys: which pairs are visible, their logits, and the rounding of
// P and dS.
#pragma once

#include "cuda/plain/block.cuh"
#include "cuda/plain/sequence.cuh"
#include "numerics/quantize.h"
#include "sagebwd/recipe.h"

namespace sagebwd::cuda::plain {

struct Shared : BlockShared {
  Sequence sequence;      // of the thread block
  float bias[kBlock];     // of the logits of each key (Q-smoothing)
  float part[4][kBlock];  // what the warps of a line found, before it is put together
  float line[kBlock];     // per line of the result: first maxima, then scales
  float inverse[kBlock];  // of the scales
};

/// Queries q0 … by keys k0 … of one sequence, positions inside the sequence.
struct Pair {
  const Params& p;
  const Sequence& s;
  int head;
  int64_t q0, k0;

  __device__ int kv() const { return head / p.group; }
  // Tokens that exist.
  __device__ int rows() const { return static_cast<int>(smaller(kBlock, s.nq - q0)); }
  __device__ int cols() const { return static_cast<int>(smaller(kBlock, s.nk - k0)); }
  // First token in arrays [heads, tokens].
  __device__ int64_t q_at() const { return head * p.tq + s.q_first + q0; }
  __device__ int64_t k_at() const { return kv() * p.tk + s.k_first + k0; }
  // Place in arrays [heads, blocks].
  __device__ int64_t q_block() const { return head * p.seq.q_blocks + s.q_block + q0 / kBlock; }
  __device__ int64_t k_block() const { return kv() * p.seq.k_blocks + s.k_block + k0 / kBlock; }
  template <typename T>
  __device__ Rows<T> queries(const T* x) const {
    return {x + q_at() * p.pitch, rows(), p.pitch};
  }
  template <typename T>
  __device__ Rows<T> keys(const T* x) const {
    return {x + k_at() * p.pitch, cols(), p.pitch};
  }
  __device__ bool sees(int row, int col) const {
    if (row >= rows()) return false;
    const Range keys = visible_keys(p.seq, s, q0 + row);
    return k0 + col >= keys.begin && k0 + col < keys.end;
  }
};

/// The columns of a pair of blocks that a thread's two rows see.
struct Spans {
  __device__ Spans(const Pair& x, const Lane& at) {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      begin[r] = end[r] = 0;
      if (at.row(r) >= x.rows()) continue;
      const Range keys = visible_keys(x.p.seq, x.s, x.q0 + at.row(r));
      begin[r] = clip(keys.begin - x.k0), end[r] = clip(keys.end - x.k0);
    }
  }
  __device__ bool sees(int r, int col) const { return col >= begin[r] && col < end[r]; }
  int begin[2], end[2];

 private:
  __device__ static int clip(int64_t x) {
    return x < 0 ? 0 : x > kBlock ? kBlock : static_cast<int>(x);
  }
};

/// What Q-smoothing took out of the logits of each key, into shared memory.
__device__ inline void mean_query_logits(const Pair& x, Shared& shared) {
  const Params& p = x.p;
  constexpr int kLanes = kThreads / kBlock;  // per key
  const int key = static_cast<int>(threadIdx.x) / kLanes,
            lane = static_cast<int>(threadIdx.x) % kLanes;
  const float* mean = p.q_mean + x.q_block() * p.d;
  double dot = 0;
  if (key < x.cols())
    for (int c = lane; c < p.d; c += kLanes)
      dot += static_cast<double>(mean[c]) *
             static_cast<double>(p.k.values[(x.k_at() + key) * p.pitch + c]);
  for (int m = 1; m < kLanes; m *= 2) dot += __shfl_xor_sync(0xffffffffu, dot, m);
  if (lane == 0)
    shared.bias[key] = static_cast<float>(static_cast<double>(p.scale * numerics::kLog2e) * dot);
}

/// left·right of two blocks of tokens over their channels, in floating point. Ends with a barrier.
template <bool kExact>
__device__ inline void channel_product(const Lane& at, const Rows<float>& left,
                                       const Rows<float>& right, bool poisoned, Shared& shared,
                                       Fragment<float>& sum) {
  clear(sum);
  const RightValues b{shared.right_values(), kValueLine, 1};
#pragma unroll 1
  for (int c = 0; c < left.pitch; c += kValueChannels) {
    stage_values<kValueChannels, kValueLine>(shared.left_values(), left, c);
    stage_values<kValueChannels, kValueLine>(shared.right_values(), right, c);
    __syncthreads();
    if (poisoned)
      multiply_poisoned(at, sum, shared.left_values(), kValueLine, b, kValueChannels,
                        [](int, int) { return true; });
    else
      multiply_values<kExact>(at, sum, shared.left_values(), kValueLine, b, kValueChannels);
    __syncthreads();
  }
}

/// Logits in log2 units, of masked pairs too. Ends with a barrier.
__device__ inline void logits(const Pair& x, const Lane& at, bool lifted, Shared& shared,
                              Fragment<float>& s) {
  const Params& p = x.p;
  const float factor = p.scale * numerics::kLog2e;
  if (lifted) {
    const bool poisoned = p.q.poisoned[x.q_block()] != 0 || p.k.poisoned[x.k_block()] != 0;
    channel_product<false>(at, x.queries(p.q.values), x.keys(p.k.values), poisoned, shared, s);
    for_elements(at, s, [&](float& to, int, int, int) { to *= factor; });
    return;
  }
  const bool biased = p.q_mean != nullptr;
  if (biased) mean_query_logits(x, shared);
  Fragment<int> sum;
  clear(sum);
#pragma unroll 1
  for (int c = 0; c < p.pitch; c += kCodeChannels) {
    stage_codes(shared.left_codes(), x.queries(p.q.codes), c);
    stage_codes(shared.right_codes(), x.keys(p.k.codes), c);
    __syncthreads();
    const int left = p.pitch - c < kCodeChannels ? p.pitch - c : kCodeChannels;
    multiply_codes(at, sum, shared.left_codes(), shared.right_codes(), kCodeLine, (left + 31) / 32);
    __syncthreads();
  }
  float lane[2], k_scale[4][2], bias[4][2];
#pragma unroll
  for (int r = 0; r < 2; ++r)
    lane[r] = at.row(r) < x.rows() ? p.q.scale[x.q_at() + at.row(r)] * factor : 0.0f;
#pragma unroll
  for (int b = 0; b < 4; ++b)
#pragma unroll
    for (int e = 0; e < 2; ++e) {
      const int col = at.col(b, e);
      k_scale[b][e] = col < x.cols() ? p.k.scale[x.k_at() + col] : 0.0f;
      bias[b][e] = biased ? shared.bias[col] : 0.0f;
    }
#pragma unroll
  for (int b = 0; b < 4; ++b)
#pragma unroll
    for (int e = 0; e < 4; ++e)
      s[b][e] = static_cast<float>(sum[b][e]) * k_scale[b][e % 2] * lane[e / 2] + bias[b][e % 2];
  if (biased) __syncthreads();  // before the next pair writes its bias
}

/// Rounds values of a pair of blocks as the recipe asks.
class Rounder {
 public:
  __device__ Rounder(const Pair& x, numerics::DitherOperand operand)
      : dither_(x.p.dither),
        row0_(static_cast<int>(x.q0 % x.p.tile_q)),
        col0_(static_cast<int>(x.k0 % x.p.tile_k)),
        u_(dither_ ? numerics::dither_uniform(x.p.seed, x.s.index, x.head, x.q0 / x.p.tile_q,
                                              x.k0 / x.p.tile_k, operand)
                   : 0.0f) {}
  __device__ int8_t operator()(float value, float inverse, int row, int col) const {
    if (!dither_) return static_cast<int8_t>(numerics::code_nearest(value, inverse));
    const float t = numerics::dither_offset(numerics::dither_query_term(row0_ + row),
                                            numerics::dither_key_term(col0_ + col, u_));
    return static_cast<int8_t>(numerics::code_dither(value, inverse, t));
  }

 private:
  bool dither_;
  int row0_, col0_;
  float u_;
};

/// Result of a thread block: 64 lines (queries or keys) by 128 channels.
inline constexpr int kResultChannels = 2 * kChannels;
using Result = Fragment<float>[kResultChannels / kChannels];

/// result += scale · codes·right: shared.codes by a block of tokens, scale[r] being that of line
/// row(r). Begins and ends with a barrier.
__device__ inline void add_product(const Lane& at, const Rows<int8_t>& right,
                                   const float (&scale)[2], int channel, Shared& shared,
                                   Result& result) {
#pragma unroll
  for (int part = 0; part < kResultChannels / kChannels; ++part) {
    const int c = channel + part * kChannels;
    if (c >= right.pitch) break;
    stage_transposed_codes(shared.left_codes(), right, c);
    __syncthreads();
    Fragment<int> sum;
    clear(sum);
    multiply_codes(at, sum, shared.codes, shared.left_codes(), kTokenLine, kBlock / 32);
#pragma unroll
    for (int b = 0; b < 4; ++b)
#pragma unroll
      for (int e = 0; e < 4; ++e)
        result[part][b][e] += scale[e / 2] * static_cast<float>(sum[b][e]);
    __syncthreads();
  }
}

/// result += scale · weights·right in floating point: shared.weights by a block of tokens. `seen`
/// says which pairs (line, token) are visible; it is asked where the tokens are poisoned.
template <typename F>
__device__ inline void add_product(const Lane& at, const Rows<float>& right, bool poisoned,
                                   const float (&scale)[2], int channel, Shared& shared,
                                   Result& result, F&& seen) {
  const RightValues b{shared.left_values(), 1, kChannelLine};
#pragma unroll
  for (int part = 0; part < kResultChannels / kChannels; ++part) {
    const int c = channel + part * kChannels;
    if (c >= right.pitch) break;
    stage_values<kChannels, kChannelLine>(shared.left_values(), right, c);
    __syncthreads();
    Fragment<float> sum;
    clear(sum);
    if (poisoned)
      multiply_poisoned(at, sum, shared.weights, kWeightLine, b, kBlock, seen);
    else
      multiply_values<false>(at, sum, shared.weights, kWeightLine, b, kBlock);
#pragma unroll
    for (int n = 0; n < 4; ++n)
#pragma unroll
      for (int e = 0; e < 4; ++e) result[part][n][e] += scale[e / 2] * sum[n][e];
    __syncthreads();
  }
}

}  // namespace sagebwd::cuda::plain
