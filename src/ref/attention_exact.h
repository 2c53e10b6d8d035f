// SPDX-License-Identifier: Apache-2.0
// Exact attention of one head in FP64, forward and backward, written straight from the formulas. It
// shares no code with the rest of the library, so that it can judge all of it.
//
//   S = c·QKᵀ (capped: S = κ·tanh(c·QKᵀ/κ))   P = softmax(S) over the visible keys   O = PV   lse =
//   log Σ exp S D = rowsum(dO∘O) − dLSE   dP = dOVᵀ   dS = P∘(dP − D)   dQ = c·dS·K   dK = c·dSᵀ·Q
//   dV = Pᵀ·dO capped: dS = P∘(dP − D)∘(1 − (S/κ)²), the gradient of the logit before the cap
//
// Only visible keys take part: a masked NaN reaches nothing. A row that sees no key has o = 0, lse
// = −inf, delta = 0 and no gradient. Memory is linear in the number of tokens.
#pragma once

#include <cstdint>
#include <functional>
#include <vector>

#include "ref/visibility.h"

namespace sagebwd::ref {

struct ExactHead {
  int64_t nq = 0, nk = 0;
  int64_t d = 0, dv = 0;         // head dim of q and k; of v and o, 0: d
  const double* q = nullptr;     // [nq, d]
  const double* k = nullptr;     // [nk, d]
  const double* v = nullptr;     // [nk, dv]
  const double* dout = nullptr;  // [nq, dv]; null: forward only
  const double* dlse = nullptr;  // [nq]; null: zero
  double scale = 1.0;
  double softcap = 0.0;  // κ; 0: none
  Visibility visible;

  int64_t value_dim() const { return dv == 0 ? d : dv; }
};

/// One row of the score matrices, for a span of visible keys begin … end - 1. dp and ds are null in
/// a forward-only run.
struct ExactRow {
  int64_t i, begin, end;
  const double *s, *p, *dp, *ds;  // [end - begin]; s is the scaled logit, capped
};

struct ExactResult {
  std::vector<double> o, lse;  // [nq, dv], [nq]
  std::vector<double> delta, dq, dk,
      dv;                // [nq], [nq, d], [nk, d], [nk, dv]; empty in a forward-only run
  double max_logit = 0;  // -inf if no key is visible, NaN if a visible logit is
};

/// The tap sees every span of visible keys, row by row.
ExactResult attention_exact(const ExactHead& head,
                            const std::function<void(const ExactRow&)>& tap = {});

/// A tile of the score matrices, row-major [rows, cols].
struct ExactTile {
  std::vector<double> s, p, dp, ds;
};

/// Rebuilds queries q0 … q0 + rows - 1 by keys k0 … k0 + cols - 1 from a finished forward and
/// backward run. The mask is not applied: entries of keys a query does not see mean nothing.
ExactTile exact_tile(const ExactHead& head, const ExactResult& result, int64_t q0, int64_t rows,
                     int64_t k0, int64_t cols);

}  // namespace sagebwd::ref
