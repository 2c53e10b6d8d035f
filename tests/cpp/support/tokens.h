// SPDX-License-Identifier: Apache-2.0
// A stretch of tokens of a contiguous tensor.
#pragma once

#include <cstdint>
#include <vector>

namespace sagebwd::testing {

/// Tokens [begin, end) of a contiguous [heads, n, d] tensor.
inline std::vector<float> tokens(const std::vector<float>& x, int64_t heads, int64_t n, int64_t d,
                                 int64_t begin, int64_t end) {
  std::vector<float> out;
  for (int64_t h = 0; h < heads; ++h)
    out.insert(out.end(), x.begin() + (h * n + begin) * d, x.begin() + (h * n + end) * d);
  return out;
}

}  // namespace sagebwd::testing
