// SPDX-License-Identifier: Apache-2.0
// Saved codes against those of the recipe oracle.
#pragma once

#include <gtest/gtest.h>

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <vector>

#include "sagebwd/codes.h"

namespace sagebwd::gpu {

inline bool same_bits(const std::vector<float>& a, const std::vector<float>& b) {
  return std::equal(a.begin(), a.end(), b.begin(), b.end(), [](float x, float y) {
    return std::bit_cast<uint32_t>(x) == std::bit_cast<uint32_t>(y) ||
           (std::isnan(x) && std::isnan(y));
  });
}

/// How close codes are to the oracle's. rounded: means and rotations have rounding of their own, as
/// those of cuda-sm90. Then one code in ten thousand may be a neighbour; most cases have none.
enum class CodesAre { same, rounded };

inline void expect_codes(const std::vector<std::byte>& got, const std::vector<std::byte>& want,
                         const CodesLayout& at, CodesAre are) {
  ASSERT_EQ(static_cast<int64_t>(got.size()), at.bytes);
  const std::pair<const char*, int64_t> parts[] = {{"q8", at.q8},
                                                   {"k8", at.k8},
                                                   {"v8", at.v8},
                                                   {"q_scale", at.q_scale},
                                                   {"mean_logit", at.mean_logit},
                                                   {"v_scale", at.v_scale},
                                                   {"k_scale", at.k_scale},
                                                   {"k_mean", at.k_mean},
                                                   {"v_mean", at.v_mean},
                                                   {"end", at.bytes}};
  for (size_t i = 0; i + 1 < std::size(parts); ++i) {
    SCOPED_TRACE(parts[i].first);
    const size_t begin = static_cast<size_t>(parts[i].second),
                 size = static_cast<size_t>(parts[i + 1].second) - begin;
    if (i < 3) {
      size_t others = 0;
      for (size_t j = begin; j < begin + size; ++j) {
        const int a = static_cast<int8_t>(got[j]), b = static_cast<int8_t>(want[j]);
        others += a != b;
        // Neighbours, and both or neither the mark of a poisoned token.
        ASSERT_LE(std::abs(a - b), are == CodesAre::same ? 0 : 1) << j - begin;
        ASSERT_EQ(a == kPoisonedCode, b == kPoisonedCode) << j - begin;
      }
      EXPECT_LE(others, size / 10000 + 1);
      if (others > 0) std::printf("%s: %zu of %zu codes differ\n", parts[i].first, others, size);
      continue;
    }
    std::vector<float> a(size / 4), b(size / 4);
    std::memcpy(a.data(), got.data() + begin, size);
    std::memcpy(b.data(), want.data() + begin, size);
    const bool dot = parts[i].second == at.mean_logit;  // a dot product, in another order
    if (are == CodesAre::same && !dot) {
      EXPECT_TRUE(same_bits(a, b));
      continue;
    }
    float top = 0.0f;
    for (float x : b)
      if (std::isfinite(x)) top = std::max(top, std::fabs(x));
    for (size_t j = 0; j < a.size(); ++j) {
      if (!std::isfinite(a[j]) && !std::isfinite(b[j])) continue;
      ASSERT_LE(std::fabs(a[j] - b[j]), dot ? 1e-5f * std::max(top, 1.0f) : 1e-6f * top) << j;
    }
  }
}

}  // namespace sagebwd::gpu
