// SPDX-License-Identifier: Apache-2.0
// What a forward of the linear branch keeps for the backward (LinearForwardArgs::averages).
#pragma once

#include <cstdint>

#include "base/math.h"
#include "spec/linear.h"

namespace sagebwd::spec {

/// Where the parts lie, in bytes. All of a call's heads are there, one behind the other, and so are
/// their blocks of queries. Head dims are multiples of 8, so every part is aligned to 16.
struct AveragesLayout {
  explicit AveragesLayout(const LinearProblem& p) {
    const int64_t heads = p.b * p.h, key_heads = p.b * p.hk;
    const int64_t blocks = ceil_div(p.nq, p.blocks.block_q);
    const auto take = [&](int64_t numbers, int64_t size) {
      const int64_t at = bytes;
      bytes += numbers * size;
      return at;
    };
    average = take(heads * blocks * p.d * p.d, 2);
    sum = take(heads * blocks * p.d, 4);
    k_mean = take(key_heads * p.d, 4), v_mean = take(key_heads * p.d, 4);
    v_magnitude = take(key_heads, 4);
  }
  int64_t bytes = 0;
  int64_t average;         // [heads, blocks, d, d], 16 bits
  int64_t sum;             // [heads, blocks, d] of the features that are averaged over
  int64_t k_mean, v_mean;  // [key heads, d]; not looked at where the caller has means
  int64_t v_magnitude;     // [key heads]
};

}  // namespace sagebwd::spec
