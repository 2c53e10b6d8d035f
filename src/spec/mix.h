// SPDX-License-Identifier: Apache-2.0
// The checked sizes of mixing and of means of blocks (sagebwd/mix.h).
#pragma once

#include <cstdint>

#include "base/math.h"
#include "sagebwd/mix.h"

namespace sagebwd::spec {

/// Tokens that a worker takes at once. Blocks are multiples of it.
inline constexpr int kMixPiece = 64;

/// Gradients of α are summed over a token, where each has an α of its own, or else over a piece;
/// these parts are then added up to the form of α.
struct MixProblem {
  int64_t b = 0, h = 0, n = 0, d = 0;
  int64_t pieces() const { return ceil_div(n, kMixPiece); }
  bool empty() const { return b == 0 || h == 0 || n == 0; }
};
struct AlphaParts {
  AlphaParts(const MixProblem& p, const Alpha& alpha)
      : unit(alpha.block == 1 ? 1 : kMixPiece),
        of_head(ceil_div(p.n, unit)),
        of_row(alpha.block / unit),
        batches(alpha.batches == 1 ? p.b : 1),
        count(p.b * p.h * of_head) {}
  int64_t unit, of_head;   // tokens of a part; parts of a head
  int64_t of_row;          // parts of a row of α
  int64_t batches, count;  // batch entries that share an α; parts of all
  /// Whether a part is the gradient of an α.
  bool are_results() const { return of_row == 1 && batches == 1; }
};

struct MeansProblem {
  int64_t b = 0, h = 0, hk = 0, nq = 0, nk = 0, d = 0;
  int64_t q_blocks = 0, k_blocks = 0;
  int64_t k_numbers() const { return b * hk * k_blocks * d; }
};

/// Throws Error(invalid_argument) unless α is for h heads of n queries in b batch entries.
void check_alpha(const Alpha& alpha, int64_t b, int64_t h, int64_t n, bool check_memory);
/// Throws unless all queries of a piece share their α.
void check_long_blocks(const Alpha& alpha);

// Throw Error(invalid_argument). check_memory: look at data pointers too.
MixProblem resolve(const MixForwardArgs& args);
MixProblem resolve(const MixBackwardArgs& args, bool check_memory);
MixProblem resolve(const MixSparseArgs& args);
MeansProblem resolve(const BlockMeansArgs& args, bool check_memory);
void check(const TopKArgs& args);

}  // namespace sagebwd::spec
