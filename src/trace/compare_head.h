// SPDX-License-Identifier: Apache-2.0
// The error of every named tensor of one head: the recipe oracle against exact attention in FP64.
//
// What is compared, always over visible entries and always with the same q, k, v and dO on both
// sides:
//   S               the true scaled logits (smoothing undone) that the backward recomputes
//   P               exp(S − LSE) as dV = PᵀdO uses it: quantised, scales undone
//   P unquantised   the same before its own quantisation, as dS = P∘(dP − D) uses it
//   dP              dO·Vᵀ, never quantised: the error is that of FP32
//   dS              as dQ = c·dS·K uses it: quantised, scales undone
//   dS for dK       as dK = c·dSᵀ·Q uses it (in `paper` the codes are the same)
//   dS unquantised  before its own quantisation: what the errors of S, P·V and D leave
//   D               rowsum(dO∘O)
//   O dQ dK dV      the outputs
// The published trace (arXiv 2603.02170: D .0736, P .1293, dP 0, dS .2045, … for the worst layer)
// has dP without error, so it too gives both sides the same V and dO. We do not know whether it
// takes P and dS before or after their own quantisation, so both are here.
#pragma once

#include <vector>

#include "ref/attention_recipe.h"
#include "sagebwd/types.h"
#include "trace/metrics.h"

namespace sagebwd::trace {

/// Outputs of another implementation, [nq, d] and [nk, d]. Those that are set are compared instead
/// of the oracle's own.
struct HeadOutputs {
  const float *o = nullptr, *dq = nullptr, *dk = nullptr, *dv = nullptr;
};

struct HeadErrors {
  ErrorStats s, p, p_unquantised, o, delta, dp, ds, ds_for_dk, ds_unquantised, dq, dk, dv;

  struct Named {
    const char* name;
    ErrorStats HeadErrors::*stats;
  };
  /// Every tensor with the name it has in tables, in the order of the computation.
  static const std::vector<Named>& names();

  /// Adds another head's rows; call finish() afterwards.
  void append(const HeadErrors& other);
  void finish();
};

/// Memory is linear in the number of tokens: score matrices are compared tile by tile. O is rounded
/// to `dtype` before the backward gets it, as the library does. The recipe's tile sizes must be
/// filled in.
HeadErrors compare_head(const ref::RecipeHead& head, const float* dout, Dtype dtype,
                        const HeadOutputs& given = {});

}  // namespace sagebwd::trace
