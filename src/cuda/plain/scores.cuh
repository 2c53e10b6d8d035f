// SPDX-License-Identifier: Apache-2.0
// A block of queries by a block of keys: which pairs are visible, their logits, the rounding of P
// and dS, and the products along tokens.
#pragma once

#include "cuda/plain/block.cuh"
#include "cuda/plain/centres.cuh"
#include "cuda/plain/sequence.cuh"
#include "cuda/tile/sequence.cuh"
#include "cuda/tile/walk.cuh"
#include "numerics/quantize.h"
#include "sagebwd/recipe.h"

namespace sagebwd::cuda::plain {

struct Shared : BlockShared {
  Sequence sequence;  // of the thread block
  // Of the pair of blocks at hand.
  int begin[kBlock], end[kBlock];     // columns each row sees
  float logit_factor[kBlock];         // of each row: scale of its codes times c·log2 e
  float shift[kBlock];                // of each row: logit of the mean key, or of the centre
  float k_scale[kBlock];              // of each column's codes
  float bias[kBlock];                 // of each column's logits (Q-smoothing)
  float v_scale[kBlock];              // of each column's codes of V (backward)
  float v_log2[kBlock];               // of the scale that is folded into each column of P …
  float v_inverse[kBlock];            // … and one over it (forward)
  float lse2[kBlock], delta[kBlock];  // of each row (backward)
  // Token scale of the other operand: of each column in dQ, of each row in dK and dV.
  float fold[kBlock];
  // Of the lines of the result.
  float part[4][kBlock];  // what the warps of a line found, before it is put together
  float line[kBlock];     // first maxima, then scales
  float inverse[kBlock];  // of the scales
};

/// Queries q0 … by keys k0 … of one sequence, positions inside the sequence.
struct Pair {
  __device__ Pair(const Params& params, const Sequence& sequence, int query_head, int key_head,
                  int q_first, int k_first)
      : p(params),
        s(sequence),
        head(query_head),
        kv(key_head),
        rows(min(kBlock, s.nq - q_first)),
        cols(min(kBlock, s.nk - k_first)),
        q0(q_first),
        k0(k_first),
        q_at(head * p.tq + s.q_first + q0),
        k_at(kv * p.tk + s.k_first + k0) {}
  const Params& p;
  const Sequence& s;
  int head, kv;
  int rows, cols;  // tokens that exist
  int q0, k0;
  int64_t q_at, k_at;  // first token in arrays [heads, tokens]

  // Place in arrays [heads, blocks].
  __device__ int64_t q_block() const { return head * p.batch.q_blocks + s.q_block + q0 / kBlock; }
  __device__ int64_t k_block() const { return kv * p.batch.k_blocks + s.k_block + k0 / kBlock; }
  // The pair's rows of Q and K, of dO and of V.
  template <typename T>
  __device__ Rows<T> queries(const T* x) const {
    return {x + q_at * p.pitch, rows, p.pitch};
  }
  template <typename T>
  __device__ Rows<T> keys(const T* x) const {
    return {x + k_at * p.pitch, cols, p.pitch};
  }
  template <typename T>
  __device__ Rows<T> gradients(const T* x) const {
    return {x + q_at * p.value_pitch, rows, p.value_pitch};
  }
  template <typename T>
  __device__ Rows<T> values(const T* x) const {
    return {x + k_at * p.value_pitch, cols, p.value_pitch};
  }
};

/// Copies what a pair's rows and columns carry into shared memory. `active(row)` is false for rows
/// that see nothing, whatever the mask says. Begins with a barrier. The caller needs one
/// afterwards.
template <typename F>
__device__ inline void load_pair(const Pair& x, Shared& shared, F&& active) {
  const Params& p = x.p;
  const int i = static_cast<int>(threadIdx.x) % kBlock;
  const auto clip = [](int n) { return n < 0 ? 0 : n > kBlock ? kBlock : n; };
  __syncthreads();
  if (threadIdx.x < kBlock) {
    tile::Range keys{0, 0};
    float scale = 0.0f, shift = 0.0f;
    if (i < x.rows) {
      if (active(i)) keys = tile::visible(p.mask, x.s, x.q0 + i);
      scale = p.q.scale[x.q_at + i];
      if (p.centre_logit != nullptr)
        shift = p.centre_logit[octave_of_key(x.k0) * (p.h * p.tq) + x.q_at + i];
      else if (p.cap.on() && p.mean_logit != nullptr)
        shift = p.mean_logit[x.q_at + i] * numerics::kLog2e;
    }
    shared.begin[i] = clip(keys.begin - x.k0), shared.end[i] = clip(keys.end - x.k0);
    shared.logit_factor[i] = scale * (p.scale * numerics::kLog2e);
    shared.shift[i] = shift;
  } else if (threadIdx.x < 2 * kBlock) {
    shared.k_scale[i] = i < x.cols ? p.k.scale[x.k_at + i] : 0.0f;
  }
}

/// Whether the block of tokens at `first` holds some of the range.
__device__ inline bool overlaps(const tile::Range& r, int first) {
  return r.end > first && r.begin < first + kBlock;
}

/// The columns that a thread's two rows see.
struct Spans {
  __device__ explicit Spans(const Shared& shared) {
    const Position at;
#pragma unroll
    for (int r = 0; r < 2; ++r) begin[r] = shared.begin[at.row(r)], end[r] = shared.end[at.row(r)];
  }
  __device__ bool sees(int r, int col) const { return col >= begin[r] && col < end[r]; }
  int begin[2], end[2];
};

/// Finds what Q-smoothing took out of the logits of each key, into shared memory.
__device__ inline void mean_query_logits(const Pair& x, Shared& shared) {
  constexpr int kPerKey = kThreads / kBlock;  // threads
  const Params& p = x.p;
  const int key = static_cast<int>(threadIdx.x) / kPerKey,
            member = static_cast<int>(threadIdx.x) % kPerKey;
  const float* mean = p.q_mean + x.q_block() * p.d;
  double dot = 0;
  if (key < x.cols)
    for (int c = member; c < p.d; c += kPerKey)
      dot += static_cast<double>(mean[c]) *
             static_cast<double>(p.k.values[(x.k_at + key) * p.pitch + c]);
  for (int m = 1; m < kPerKey; m *= 2) dot += __shfl_xor_sync(0xffffffffu, dot, m);
  if (member == 0)
    shared.bias[key] = static_cast<float>(static_cast<double>(p.scale * numerics::kLog2e) * dot);
}

/// left·right of two blocks of tokens over their channels, in floating point; `right` has values or
/// codes. Ends with a barrier.
template <bool kExact, typename T>
__device__ inline void channel_product(const Rows<float>& left, const Rows<T>& right, bool poisoned,
                                       Shared& shared, Fragment<float>& sum) {
  clear(sum);
  const RightValues b{shared.right_values(), kValueLine, 1};
#pragma unroll 1
  for (int c = 0; c < left.pitch; c += kChannels) {
    stage<kChannels, kValueLine>(shared.left_values(), left, c);
    stage<kChannels, kValueLine>(shared.right_values(), right, c);
    __syncthreads();
    const int depth = left.pitch - c < kChannels ? left.pitch - c : kChannels;
    if (poisoned)
      multiply_poisoned(sum, shared.left_values(), kValueLine, b, depth,
                        [](int, int) { return true; });
    else
      multiply_values<kExact>(sum, shared.left_values(), kValueLine, b, depth);
    __syncthreads();
  }
}

/// q·k of a pair in log2 units, of codes or (lifted) of values. Ends with a barrier.
__device__ inline void key_logits(const Pair& x, bool lifted, Shared& shared, Fragment<float>& s) {
  const Params& p = x.p;
  if (lifted) {
    const float factor = p.scale * numerics::kLog2e;
    // In `vectorwise` one token's NaN may not change how the others are multiplied.
    const bool poisoned = p.scheme == Scheme::paper &&
                          (p.q.poisoned[x.q_block()] != 0 || p.k.poisoned[x.k_block()] != 0);
    channel_product<false>(x.queries(p.q.values), x.keys(p.k.values), poisoned, shared, s);
    for_elements(s, [&](float& to, int, int, int) { to *= factor; });
    return;
  }
  const bool biased = p.q_mean != nullptr;
  if (biased) mean_query_logits(x, shared);
  Fragment<int> sum;
  clear(sum);
#pragma unroll 1
  for (int c = 0; c < p.pitch; c += kCodeChannels) {
    stage<kCodeChannels, kCodeLine>(shared.left_codes(), x.queries(p.q.codes), c);
    stage<kCodeChannels, kCodeLine>(shared.right_codes(), x.keys(p.k.codes), c);
    __syncthreads();
    const int left = p.pitch - c < kCodeChannels ? p.pitch - c : kCodeChannels;
    multiply_codes(sum, shared.left_codes(), shared.right_codes(), kCodeLine, (left + 31) / 32);
    __syncthreads();
  }
  const Position at;
  const float logit_factor[2] = {shared.logit_factor[at.row(0)], shared.logit_factor[at.row(1)]};
#pragma unroll
  for (int b = 0; b < 4; ++b)
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      const int col = at.col(b, e % 2);
      s[b][e] = static_cast<float>(sum[b][e]) * shared.k_scale[col] * logit_factor[e / 2];
      if (biased) s[b][e] += shared.bias[col];
    }
}

/// Logits in log2 units before the cap, of masked pairs too, after load_pair. A cap must know what
/// the mean key takes from them; without one they lack it. Ends with a barrier.
__device__ inline void logits(const Pair& x, bool lifted, Shared& shared, Fragment<float>& s) {
  key_logits(x, lifted, shared, s);
  if (!x.p.cap.on() && x.p.centre_logit == nullptr) return;
  for_elements(s, [&](float& to, int, int row, int) { to += shared.shift[row]; });
}

/// Rounds values of a pair of blocks as the recipe asks for the codes of a matmul.
class Rounder {
 public:
  __device__ Rounder(const Pair& x, Matmul matmul, numerics::DitherOperand operand, float levels)
      : dither_((x.p.dithered & matmul) != 0), levels_(levels) {
    if (!dither_) return;
    const int q_tile = x.q0 / x.p.tile_q, k_tile = x.k0 / x.p.tile_k;
    row0_ = x.q0 - q_tile * x.p.tile_q;
    col0_ = x.k0 - k_tile * x.p.tile_k;
    u_ = numerics::dither_uniform(x.p.seed, x.s.index, x.head, q_tile, k_tile, operand);
  }
  __device__ int8_t operator()(float value, float inverse, int row, int col) const {
    // As numerics::code_nearest: the conversion turns NaN into 0. Unsigned codes keep their bits.
    if (!dither_) return static_cast<int8_t>(__float2int_rn(value * inverse));
    const float t = numerics::dither_offset(numerics::dither_query_term(row0_ + row),
                                            numerics::dither_key_term(col0_ + col, u_));
    return static_cast<int8_t>(numerics::code_dither(value, inverse, t, levels_));
  }

 private:
  bool dither_;
  float levels_;
  int row0_ = 0, col0_ = 0;
  float u_ = 0.0f;
};

/// Result of a thread block: 64 lines (queries or keys) by 128 channels.
inline constexpr int kParts = kResultChannels / kChannels;
using Result = Fragment<float>[kParts];

/// result += scale · codes·right: shared.codes by a block of tokens, scale[r] being that of line
/// row(r). Has a barrier before it reads shared.codes, and ends with one.
template <arch::Bytes kCodes>
__device__ inline void add_product(const Rows<int8_t>& right, const float (&scale)[2], int channel,
                                   Shared& shared, Result& result) {
#pragma unroll
  for (int part = 0; part < kParts; ++part)
    if (channel + part * kChannels < right.pitch)
      stage_transposed_codes(shared.left_codes() + part * kChannels * kTokenLine, right,
                             channel + part * kChannels);
  __syncthreads();
#pragma unroll
  for (int part = 0; part < kParts; ++part) {
    if (channel + part * kChannels >= right.pitch) break;
    Fragment<int> sum;
    clear(sum);
    multiply_codes<kCodes>(sum, shared.codes, shared.left_codes() + part * kChannels * kTokenLine,
                           kTokenLine, kBlock / 32);
#pragma unroll
    for (int b = 0; b < 4; ++b)
#pragma unroll
      for (int e = 0; e < 4; ++e)
        result[part][b][e] += scale[e / 2] * static_cast<float>(sum[b][e]);
  }
  __syncthreads();
}

/// result += scale · weights·right in floating point: shared.weights by a block of tokens, values
/// or codes. `seen` says which pairs (line, token) are visible; it is asked where the tokens are
/// poisoned.
template <typename T, typename F>
__device__ inline void add_product(const Rows<T>& right, bool poisoned, const float (&scale)[2],
                                   int channel, Shared& shared, Result& result, F&& seen) {
  const RightValues b{shared.left_values(), 1, kChannelLine};
#pragma unroll
  for (int part = 0; part < kParts; ++part) {
    if (channel + part * kChannels >= right.pitch) break;
    stage<kChannels, kChannelLine>(shared.left_values(), right, channel + part * kChannels);
    __syncthreads();
    Fragment<float> sum;
    clear(sum);
    if (poisoned)
      multiply_poisoned(sum, shared.weights, kWeightLine, b, kBlock, seen);
    else
      multiply_values<false>(sum, shared.weights, kWeightLine, b, kBlock);
#pragma unroll
    for (int n = 0; n < 4; ++n)
#pragma unroll
      for (int e = 0; e < 4; ++e) result[part][n][e] += scale[e / 2] * sum[n][e];
    __syncthreads();
  }
}

}  // namespace sagebwd::cuda::plain
