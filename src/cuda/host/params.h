// SPDX-License-Identifier: Apache-2.0
// The plain structs that cross from host to device. Every pointer is device memory, with its shape.
//
// Inside the workspace the tokens of all sequences lie behind one another, each sequence padded to
// whole blocks of kBlock tokens: tq and tk are the padded totals. Channels are padded to D = 64 or
// 128. Padding holds zeros.
#pragma once

#include <cstdint>

namespace sagebwd::cuda {

inline constexpr int kBlock = 128;  // tokens per padded block, and queries or keys per thread block
inline constexpr int kGroup = 64;   // tokens per row of a transposed copy

/// Where one document of a packed batch starts; an array of these has one entry more than there are
/// documents.
struct DocumentStart {
  int32_t q, k;              // tokens, in the caller's tensors
  int32_t q_block, k_block;  // blocks, in the workspace
};

/// All sequences of a call.
struct Sequences {
  int count;
  int64_t nq, nk;                            // of each sequence, when not packed
  int q_blocks, k_blocks;                    // of each sequence, when not packed
  const DocumentStart* documents = nullptr;  // [count + 1]; null: not packed
};

/// Query i sees keys i + shift - left … i + shift + right; -1: open. shift = nk - nq if
/// bottom_right.
struct MaskParams {
  bool bottom_right;
  int64_t left, right;
};

/// A tensor of the caller's, [b, h, n, d] with unit channel stride.
struct Strided {
  void* data;
  int64_t batch, head, token;  // strides in elements
  bool vector;                 // rows start at multiples of 16 bytes
};

/// FP32 statistics of the caller's, [b, h, n].
struct StridedStats {
  float* data;
  int64_t batch, head, token;
};

/// Scale of a key's codes. An integer sum s arrives as the float 1.5·2^23 + s (tile/codes.cuh), and
/// one multiply-add makes scale·s of it: `offset` = -1.5·2^23·scale, exact because the scale is
/// rounded to 22 bits.
struct KeyScale {
  float scale, offset;
};

struct ForwardParams {
  Sequences seq;
  MaskParams mask;
  int d, group;
  int64_t tq, tk;
  const int8_t* q8;           // [h, tq, D]
  const float* lane;          // [h, tq]: scale of Q times c·log2e
  const float* q_mean_logit;  // [h, tq]: c·q·mean(K)
  const int8_t* k8;           // [hk, tk, D]
  const KeyScale* k_scale;    // [hk, tk]
  const int8_t* v8t;          // [hk, tk / kGroup, D, kGroup]
  const float* v_scale;       // [hk, tk / tile_k]; NaN: the tile holds NaN or Inf
  const void* v16;            // [hk, tk, D], only of tiles whose P·V is in 16 bit
  const float* v_mean;        // [sequences, hk, D]
  int64_t pv16_tiles;
  float p_levels, p_unit;  // of the codes of P, and the inverse of that
  Strided o;
  StridedStats lse;
  uint32_t* max_logit;  // [sequences, h] in order-preserving code, or null
  uint64_t seed;        // of the dither
};

/// What the rows of dQ need: lane as in the forward, lse2 = log2 of the sum over keys of 2^s2 (+inf
/// for rows without keys), delta = D.
struct QueryRow {
  float lane, lse2, delta;
};

/// The same for dK and dV, with φ = the token scale of dO folded into the exponent of P:
///   φ·P = 2^(lane·x - lse2)     φ·P·(dP·slope + offset) = dS·lane
/// where x is the integer logit times the key's scale. A row with dO = 0 has a tiny φ instead, and
/// a row with Q = 0 a tiny lane.
struct QueryExponent {
  float lane, lse2;
};
struct QueryGradient {
  float slope, offset;
};

struct BackwardParams {
  Sequences seq;
  MaskParams mask;
  int d, h, hk, group;
  int64_t tq, tk;
  float scale;
  float p_levels, p_unit;           // as in the forward
  const int8_t* q8;                 // [h, tq, D]
  const int8_t* q8t;                // [h, tq / kGroup, D, kGroup]
  const QueryRow* q_row;            // [h, tq]
  const QueryExponent* q_exponent;  // [h, tq]
  const QueryGradient* q_gradient;  // [h, tq]
  const int8_t* k8;                 // [hk, tk, D]
  const int8_t* k8t;                // [hk, tk / kGroup, D, kGroup]
  const KeyScale* k_scale;          // [hk, tk]
  const void* v16;                  // [hk, tk, D]; null: V is as the kernel wants it
  const void* do16;                 // [h, tq, D]; null: so is dO
  Strided v, dout;
  const int8_t* do8t;   // [h, tq / kGroup, D, kGroup]
  float* dq_sum;        // [h, tq / 16, D / 8, 128]: dQ·lane/c (arch/global_add.cuh), or null
  const float* k_mean;  // [sequences, hk, D]
  StridedStats dlse;    // data null: none
  bool partial_kv;
  Strided dq, dk, dv;
  bool dq_chunks;  // rows of dQ start at multiples of 16 bytes
  uint64_t seed;   // of the dither
};

}  // namespace sagebwd::cuda
