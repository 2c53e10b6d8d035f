// SPDX-License-Identifier: Apache-2.0
// Random sizes of the linear branch, a pure function of a number.
#pragma once

#include "linear/linear_problem.h"

namespace sagebwd::testing {

inline LinearSizes random_linear_sizes(int64_t number, bool tuned = false) {
  Random r(0x11ea2 + static_cast<uint64_t>(number));
  const int64_t hk = r.integer(1, 2), d = tuned ? 64 * r.integer(1, 2) : 8 * r.integer(1, 18);
  return {.b = r.integer(1, 2),
          .h = hk * r.integer(1, 2),
          .hk = hk,
          .nq = r.integer(1, 400),
          .nk = r.integer(1, 500),
          .d = d,
          .share = 0.1 * static_cast<double>(r.integer(0, 10)),
          .dtype = r.chance(0.5)            ? Dtype::bf16
                   : tuned || r.chance(0.5) ? Dtype::f16
                                            : Dtype::f32,
          .mean_free_keys = r.chance(0.6),
          .block_q = static_cast<int>(64 * r.integer(1, 3)),
          .block_k = static_cast<int>(64 * r.integer(1, 2)),
          .tokens_first = r.chance(0.5)};
}

}  // namespace sagebwd::testing
