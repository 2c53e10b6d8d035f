// SPDX-License-Identifier: Apache-2.0
// The query side of one block: codes of Q in the layout S wants, per-query scales, and what the
// sums of codes lack of the logits.
#pragma once

#include "cpu/keys.h"
#include "cpu/plan.h"
#include "numerics/octaves.h"

namespace sagebwd::cpu {

/// One block of queries, ready for S. Arrays have bq entries unless said otherwise; padding queries
/// are zero.
struct QueryBlock {
  int8_t* q8 = nullptr;           // quads along d: [bq/16][dk/4][16][4]
  float* scale = nullptr;         // of the codes; NaN for a token that is not finite
  float* logit_factor = nullptr;  // what turns K-scaled sums into logits in log2 units
  int32_t* start = nullptr;       // accumulator start of S (Kernels::flip)
  float* mean = nullptr;          // [dl] mean query of the block (smooth_q)
  float* turned_mean = nullptr;   // [dl] the same, rotated as the codes are
  float* qt_float = nullptr;      // [dl][bq], only when S is lifted
  // What the sums of codes lack of the logits, in log2 units. `vectorwise`: the logits of the
  // centre of each octave of keys, [octaves][bq]. `paper`, with a cap alone: those of the mean key,
  // [bq].
  float* shift = nullptr;

  void place(Arena& arena, const Plan& plan, int64_t blocks, bool lifted);
  QueryBlock at(const Plan& plan, int64_t block) const;
  /// The shift of a tile whose keys begin at this one; null: none.
  const float* shift_of(const Plan& plan, int64_t first_key) const {
    if (plan.paper()) return shift;
    return shift + plan.bq * numerics::octave_of_block(first_key / kKeysPerScale);
  }
};

/// Scratch of prepare_queries, one per slot.
struct QueryScratch {
  // Long enough for rows of dO and O as well.
  float* rows = nullptr;    // [bq][dl]: the queries as given, afterwards
  float* smooth = nullptr;  // [bq][dl]: mean removed, rotated
  int8_t* codes = nullptr;  // [bq][dk]
  double* shift = nullptr;  // [bq] scale · q·mean(K) in `paper`, else zero
  int32_t* dots = nullptr;  // [centre rows][bq], in `vectorwise`

  void place(Arena& arena, const Plan& plan);
  QueryScratch at(const Plan& plan, int64_t slot) const;
};

void prepare_queries(const isa::Kernels& kernels, const Plan& plan, const AttentionArgs& a,
                     const KeyData& keys, const Block& b, int64_t h, const QueryBlock& out,
                     const QueryScratch& scratch);

/// Codes [bq][ldc] and scales [bq] of the first `count` rows [ld] of a block of Q or dO; zero
/// behind them.
void encode_queries(const isa::Kernels& kernels, const Plan& plan, const float* rows, int ld,
                    int count, float* scale, int8_t* codes, int ldc);

/// Loads bq rows [ld] of Q, dO or O, padding queries zero.
void load_query_rows(const isa::Kernels& kernels, const Plan& plan, const TensorView& x,
                     const Block& b, int64_t h, float* rows, int ld);

/// Logits of the mean query for each key of a block, in log2 units (smooth_q).
void mean_query_logits(const Plan& plan, const float* mean, const float* k_rows, float* bias);

}  // namespace sagebwd::cpu
