// SPDX-License-Identifier: Apache-2.0
// Where the backward adds up dQ, and row sums of dS where those are wanted.
#pragma once

#include <algorithm>
#include <cstdint>

#include "cpu/plan.h"

namespace sagebwd::cpu {

/// Sums over keys for the query blocks of the query heads of one key head of one sequence. A block
/// that nothing was added to is never written or read, which `begun` says.
struct QuerySums {
  float *dq, *query_sum;  // of the first block; query_sum may be null
  uint8_t* begun;         // one a block
  int64_t heads, blocks;
  int64_t head_step;  // blocks from one head to the next

  QuerySums at(const Plan& plan, int64_t head, int64_t block) const {
    const int64_t skip = head * head_step + block;
    return {dq + skip * plan.dl * plan.bq,
            query_sum == nullptr ? nullptr : query_sum + skip * plan.bq,
            begun + skip,
            1,
            1,
            0};
  }
  void clear(const Plan& plan) const {
    for (int64_t h = 0; h < heads; ++h) std::fill_n(at(plan, h, 0).begun, blocks, uint8_t{0});
  }
  /// Makes the sums of one block ready to be added to.
  void begin(const Plan& plan) const {
    if (*begun) return;
    *begun = 1;
    std::fill_n(dq, plan.dl * plan.bq, 0.0f);
    if (query_sum != nullptr) std::fill_n(query_sum, plan.bq, 0.0f);
  }
  void add(const isa::Kernels& kernels, const Plan& plan, const QuerySums& other) const {
    for (int64_t h = 0; h < heads; ++h)
      for (int64_t b = 0; b < blocks; ++b) {
        const QuerySums s = at(plan, h, b), o = other.at(plan, h, b);
        if (!*o.begun) continue;
        s.begin(plan);
        kernels.add_values(o.dq, static_cast<int64_t>(plan.dl) * plan.bq, s.dq);
        if (query_sum != nullptr) kernels.add_values(o.query_sum, plan.bq, s.query_sum);
      }
  }
};

}  // namespace sagebwd::cpu
