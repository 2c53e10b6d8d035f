// SPDX-License-Identifier: Apache-2.0
// A validated attention problem. Everything below the API works from this and checks nothing again.
#pragma once

#include <cstdint>

#include "spec/batch.h"

namespace sagebwd::spec {

/// Half-open range of keys.
struct KeyRange {
  int64_t begin, end;
};

struct Problem : Batch {
  int64_t dv;  // head dim of v, o and their gradients
  float scale;
  float softcap = 0.0f;  // 0: none
  Align align;
  int64_t left, right;  // window with causal folded in; -1: open
  Recipe recipe;
  int levels_of_p = 0;  // of the codes of P; 0: those of the scheme and the backend. Tests compare
                        // implementations with equal ones
  bool has_dlse = false;
  bool partial_kv = false;
  bool deterministic = false;  // dQ bit-equal from run to run
  bool has_codes = false;      // written by the forward; in the backward they replace q, k and v

  /// Leading entries of each list whose P stays unquantised; -1: all. None without lists.
  int lead() const { return has_lists() ? blocks.lead : 0; }
  /// Keys that query i of a sequence sees. Both ends grow with i. Empty ranges have begin == end.
  KeyRange visible(const Sequence& s, int64_t i) const {
    const int64_t shift = align == Align::bottom_right ? s.nk - s.nq : 0;
    const int64_t end_open = right < 0 ? s.nk : i + shift + right + 1;
    const int64_t end = end_open < 0 ? 0 : end_open > s.nk ? s.nk : end_open;
    const int64_t begin_open = left < 0 ? 0 : i + shift - left;
    const int64_t begin = begin_open < 0 ? 0 : begin_open;
    return {begin < end ? begin : end, end};
  }
  bool capped() const { return softcap != 0.0f; }
  /// Rows of dS sum to dLSE over all keys and before a cap. Otherwise sums are added up: of dS
  /// where a call sees part of the keys, of what the cap takes from dS where it sees all. That
  /// leaves the error of D out, which the sum of dS has and which the mean key would multiply.
  bool adds_row_sums() const { return partial_kv || capped(); }
  bool sums_what_cap_takes() const { return capped() && !partial_kv; }
  bool lifted(uint32_t matmul) const { return (recipe.high_precision & matmul) != 0; }
};

/// Levels of the codes of P in an implementation whose bytes hold up to `most`: 255 where the
/// hardware multiplies unsigned by signed bytes. The published method has 127.
inline int p_levels(Scheme scheme, int most) { return scheme == Scheme::paper ? 127 : most; }

/// Whether V has a scale per token that is folded into P, and dP is made from the same codes. O
/// lifted out of INT8 has no codes of V.
inline bool folds_v(const Recipe& r) {
  return r.scheme != Scheme::paper && (r.high_precision & kMatmulO) == 0;
}

/// Throws Error(invalid_argument) with the reason if codes of the recipe cannot replace q, k and v.
void check_codes_recipe(const Recipe& r);

/// Checks the arguments and throws Error(invalid_argument) with what was expected and what came.
/// check_memory also looks at data pointers; the workspace is checked by the caller, who knows its
/// size.
Problem resolve(const ForwardArgs& args, bool check_memory);
Problem resolve(const BackwardArgs& args, bool check_memory);

}  // namespace sagebwd::spec
