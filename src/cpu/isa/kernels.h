// SPDX-License-Identifier: Apache-2.0
// The micro-kernel table: everything the blocked loops of src/cpu ask of an instruction set.
//
// All score tiles are held transposed, [keys][queries], so that a vector runs over queries. Then
// the row maximum of the softmax, its sum, the per-query scales and the running output are all
// vertical operations; no shuffles are needed.
//
// clang-format off
//   Sᵀ  [keys, queries] = K8   · Q8ᵀ    left K8   [keys][d]        right Q8  as quads along d
//   Oᵀ  [d, queries]    = V8ᵀ  · P8ᵀ    left V8ᵀ  [d][keys]        right P8  as quads along keys
//   dPᵀ [keys, queries] = V    · dOᵀ    FP32
//   dV  [keys, d]       = P8ᵀ  · dO8    left P8ᵀ  [keys][queries]  right dO8 as quads along queries
//   dK  [keys, d]       = dS8ᵀ · Q8     left dS8ᵀ [keys][queries]  right Q8  as quads along queries
//   dQᵀ [d, queries]    = K8ᵀ  · dS8ᵀ   left K8ᵀ  [d][keys]        right dS8 as quads along keys
// clang-format on
//
// A left operand is row-major with the contraction contiguous. A right operand is stored in panels
// of 16 columns, [columns/16][contraction/4][16][4] bytes ("quads"): what vpdpbusd, vpmaddubsw and
// AMX all read directly.
#pragma once

#include <cstdint>

#include "base/half.h"
#include "numerics/softcap.h"
#include "sagebwd/types.h"

namespace sagebwd::cpu::isa {

inline constexpr int kPanel = 16;  // columns of a panel
inline constexpr int kStrip = 64;  // queries a tile kernel keeps in registers; tile_q is a multiple
/// INT8 contractions are padded with zero codes to a multiple of kContract.
inline constexpr int kContract = 64;
inline constexpr int kMostContract = 256;

/// An INT8 product of left [m][k] and right panels [n/16][k/4][16][4]; m a multiple of 4, n of 16,
/// k of 64
/// up to 256.
struct Int8Product {
  int m, n, k;
  const void* left;
  int64_t left_stride;  // bytes
  const void* right;
  const int32_t* start;  // [n] start of the accumulators, or null for zero (see Kernels::flip)
};

/// An FP32 product of row-major left [m][k] and row-major right [k][n]; m a multiple of 4, n of 16.
struct FloatProduct {
  int m, n, k;
  const float* left;
  int64_t left_stride;
  const float* right;
  int64_t right_stride;
};

/// A BF16 product of row-major left [m][k] and right panels [n/16][k/2][16][2] ("pairs"); m a
/// multiple of 4, n of 64, k of 2. Strides count values.
struct Bf16Product {
  int m, n, k;
  const bf16* left;
  int64_t left_stride;
  const bf16* right;
};

/// One score tile of the forward.
struct ForwardTile {
  int tile_q, tile_k;
  void* s;  // [tile_k][tile_q]: int32 sums in (FP32 if s_is_float); probabilities out if p_float
  bool s_is_float;
  const float* k_scale;       // [tile_k]
  const float* logit_factor;  // [tile_q] query scale · logit scale · log2 e
  const float* bias;          // [tile_k] logits of the mean query, or null
  const float* shift =
      nullptr;                 // [tile_q] added to the logits, or null: what the sums of codes lack
  numerics::Softcap cap = {};  // of the logits
  const int32_t *begin, *end;  // [tile_q] visible keys relative to the tile, or null when all are
  // V's scale, folded into P: its logarithm and its inverse, [tile_k]; zeros and ones where nothing
  // is folded.
  const float *v_log2, *v_inverse;
  float *m, *l;         // [tile_q] running maximum (log2 units, with v_log2) and sum
  float* logit_max;     // [tile_q] running maximum of the logits, or null
  float *alpha, *beta;  // [tile_q] out: factors of the old output and of this tile's product
  bool p_float;         // keep p as FP32 in s instead of codes
  void* p8;             // quads along keys
  float p_levels;
  const float* dither_query;  // [tile_q] dither terms, or null for nearest rounding
  float dither_u;
};

/// One score tile of the backward. Two steps: gradients of the softmax and the maxima of
/// each query and key, then codes.
struct BackwardTile {
  int tile_q, tile_k;
  void* s;  // [tile_k][tile_q] int32 sums (FP32 if s_is_float) in; P·sdO (P if dv_float) out
  bool s_is_float;
  float* dp;                  // [tile_k][tile_q] dP / v_scale in, made from the codes of V; dS out
  const float* v_scale;       // [tile_k]
  const float* k_scale;       // [tile_k], for the logits
  const float* logit_factor;  // [tile_q]
  const float* bias;          // [tile_k] or null
  const float* shift = nullptr;  // [tile_q] or null, as in the forward
  numerics::Softcap cap = {};
  const int32_t *begin, *end;
  const float *lse2, *delta;          // [tile_q] delta: D without what those codes lack of dP
  const float *q_scale, *do_scale;    // [tile_q] folded into dS for dK and into P for dV
  const float* k_fold;                // [tile_k] folded into dS for dQ
  bool per_vector;                    // scales per key and per query; else one per tile
  bool dv_float, dq_float, dk_float;  // the matmul is lifted: no codes
  float* query_sum;                   // [tile_q] += sum over keys of dS, or null
  bool sums_what_cap_takes = false;   // that sum is of dS before the cap minus dS
  float* key_sum;                     // [tile_k] = sum over queries of dS, or null
  int32_t* key_max;                   // scratch [2][tile_k][16]
  void *p8, *ds8_key;                 // left operands [tile_k][tile_q]
  void* ds8_query;                    // quads along keys
  float *p_scale, *ds_key_scale;      // [tile_k] out
  float* ds_query_scale;              // [tile_q] out
  int32_t* ds_query_start;            // [tile_q] out: accumulator start of dQ where Kernels::flip
  // What is dithered, and with which uniform number of the tile.
  struct Dither {
    bool on;
    float u;
  };
  Dither dither_p, dither_ds_query, dither_ds_key;
  const float* dither_query;  // [tile_q] dither terms
  float p_levels;
};

struct Kernels {
  const char* name;
  /// Why this machine cannot run these kernels; null when it can.
  const char* (*unavailable)();
  /// XORed into the codes of a signed left operand. 0x80 where the hardware wants it unsigned; the
  /// accumulators then start at -128 times the column sums of the right operand. 0 elsewhere, with
  /// no start needed.
  uint8_t flip;
  /// Most levels the codes of P may have: 255, or 127 where sums of products would overflow.
  int p_levels;

  // INT8 products. Letters: signedness of left and right.
  void (*store_ss)(const Int8Product&, int32_t* c, int64_t ldc);  // c = sums
  void (*row_us)(const Int8Product&, const float* row, float* c,
                 int64_t ldc);  // c += sums · row[i]
  void (*row_ss)(const Int8Product&, const float* row, float* c, int64_t ldc);
  void (*column_ss)(const Int8Product&, const float* column, float* c,
                    int64_t ldc);  // c += sums · column[j]
  void (*blend_su)(const Int8Product&, const float* alpha, const float* beta, float* c,
                   int64_t ldc);  // c = c · alpha[j] + sums · beta[j]

  // FP32 products.
  void (*store_f32)(const FloatProduct&, float* c, int64_t ldc);
  void (*add_f32)(const FloatProduct&, float* c, int64_t ldc);
  void (*blend_f32)(const FloatProduct&, const float* alpha, const float* beta, float* c,
                    int64_t ldc);

  /// BF16 operands, FP32 sums: for values that are exact in BF16. Null where the instruction set
  /// has no such product.
  void (*store_bf16)(const Bf16Product&, float* c, int64_t ldc);

  void (*forward_tile)(const ForwardTile&);
  void (*backward_tile)(const BackwardTile&);

  // Preparation of inputs.

  /// `rows` rows of `d` values to FP32, the rest of each row of `ld` values zero.
  void (*load_rows)(Dtype dtype, const void* src, int64_t stride, int rows, int d, float* dst,
                    int ld);
  /// The reverse, times `factor`.
  void (*store_rows)(Dtype dtype, void* dst, int64_t stride, int rows, int d, const float* src,
                     int ld, float factor);
  /// sum[c] += values of the rows that are finite throughout; returns how many those are.
  int (*sum_rows)(const float* x, int ld, int rows, int d, double* sum);
  /// x[r] -= row, for each row of ld values (a multiple of 16).
  void (*subtract_row)(float* x, int ld, int rows, const float* row);
  /// dots[r] = x[r] · y[r] over ld values (a multiple of 16), summed in FP64. Rows of y are ldy
  /// apart; 0: all are the same.
  void (*row_dots)(const float* x, int ld, int rows, const float* y, int64_t ldy, double* dots);
  /// sum[i] += x[i], n values (a multiple of 16).
  void (*add_values)(const float* x, int64_t n, float* sum);
  /// Largest magnitude of each row (ld a multiple of 16); Inf or NaN where one is not finite.
  void (*row_magnitudes)(const float* x, int ld, int rows, float* amax);
  /// numerics::rotate and rotate_back of each row, bit for bit (d a multiple of 8, ld of 16).
  void (*rotate_rows)(float* x, int ld, int rows, int d);
  void (*rotate_rows_back)(float* x, int ld, int rows, int d);
  /// Codes of rows with one scale each; a row whose scale is NaN gets codes 0. codes has row stride
  /// ldc >= ld; bytes past ld are left alone.
  void (*encode_rows)(const float* x, int ld, int rows, const float* scale, int8_t* codes,
                      int64_t ldc);
  /// Codes [rows][ldc] as FP32 [rows][ld] (ld a multiple of 16).
  void (*decode_rows)(const int8_t* codes, int64_t ldc, int rows, int ld, float* x);
  /// Sums of the codes of each row, and of each column (cols a multiple of 16).
  void (*sum_row_codes)(const int8_t* codes, int64_t ldc, int rows, int cols, int32_t* sum);
  void (*sum_column_codes)(const int8_t* codes, int64_t ldc, int rows, int cols, int32_t* sum);
  /// Codes [rows][ldc] to quads along the row: [rows/16][cols/4][16][4].
  void (*pack_along_rows)(const int8_t* codes, int64_t ldc, int rows, int cols, void* dst);
  /// Codes [rows][ldc] to quads along the column: [cols/16][rows/4][16][4].
  void (*pack_along_columns)(const int8_t* codes, int64_t ldc, int rows, int cols, void* dst);
  /// Codes [rows][ldc] to left operand [cols][ldd] (rows a multiple of 64, cols of 16).
  void (*transpose_codes)(const int8_t* codes, int64_t ldc, int rows, int cols, int8_t* dst,
                          int64_t ldd);
  /// FP32 [rows][ld] to [cols][ldd].
  void (*transpose_f32)(const float* x, int64_t ld, int rows, int cols, float* dst, int64_t ldd);

  // The linear branch.

  /// Softmax of the first d values of each row, in place; the rest of the row (ld a multiple of 16)
  /// becomes zero.
  void (*softmax_rows)(float* x, int ld, int rows, int d);
  /// The way back: dphi becomes phi ∘ (dphi − phi·dphi), row by row.
  void (*softmax_rows_back)(const float* phi, float* dphi, int ld, int rows);
  /// sum[i] += x[i], sum[i] += |x[i]| and sum[i] -= x[i].
  void (*add_in_f64)(const float* x, int64_t n, double* sum);
  void (*add_magnitudes_in_f64)(const float* x, int64_t n, double* sum);
  void (*subtract_in_f64)(const float* x, int64_t n, double* sum);
};

/// All tables this library was built with, best first.
const Kernels* const* tables(int* count);

}  // namespace sagebwd::cpu::isa
