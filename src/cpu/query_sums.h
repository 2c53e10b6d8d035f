// SPDX-License-Identifier: Apache-2.0
// Where the backward adds up dQ, and row sums of dS where those are wanted.
#pragma once

#include <algorithm>
#include <cstdint>

#include "cpu/plan.h"

namespace sagebwd::cpu {

/// Sums over keys for the query blocks of the query heads of one key head of one sequence.
struct QuerySums {
  float *dq, *query_sum;  // of the first block; query_sum may be null
  int64_t heads, blocks;
  int64_t head_step;  // blocks from one head to the next

  QuerySums at(const Plan& plan, int64_t head, int64_t block) const {
    const int64_t skip = head * head_step + block;
    return {dq + skip * plan.dl * plan.bq,
            query_sum == nullptr ? nullptr : query_sum + skip * plan.bq, 1, 1, 0};
  }
  void clear(const Plan& plan) const {
    for (int64_t h = 0; h < heads; ++h) {
      const QuerySums s = at(plan, h, 0);
      std::fill_n(s.dq, blocks * plan.dl * plan.bq, 0.0f);
      if (query_sum != nullptr) std::fill_n(s.query_sum, blocks * plan.bq, 0.0f);
    }
  }
  void add(const Plan& plan, const QuerySums& other) const {
    for (int64_t h = 0; h < heads; ++h) {
      const QuerySums s = at(plan, h, 0), o = other.at(plan, h, 0);
      for (int64_t i = 0; i < blocks * plan.dl * plan.bq; ++i) s.dq[i] += o.dq[i];
      for (int64_t i = 0; query_sum != nullptr && i < blocks * plan.bq; ++i)
        s.query_sum[i] += o.query_sum[i];
    }
  }
};

}  // namespace sagebwd::cpu
