// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <bit>
#include <cmath>
#include <cstdint>
#include <limits>

namespace sagebwd::cuda::arch {

/// The one NaN that a GPU makes. Its sign is that of a large number: kernels compare bits.
inline const float kNan = std::bit_cast<float>(0x7fffffff);

inline float exp2_approx(float x) {
  const float y = std::exp2(x);
  return y != y ? kNan : y < std::numeric_limits<float>::min() ? 0.0f : y;
}
inline float log2_approx(float x) {
  return std::log2(x < std::numeric_limits<float>::min() ? 0.0f : x);
}
inline float reciprocal_approx(float x) { return 1.0f / x; }
inline void keep(uint32_t&) {}
inline uint32_t thread_index() { return threadIdx.x; }
inline float max_nan(float a, float b) { return a != a || b != b ? kNan : a < b ? b : a; }
inline float min_nan(float a, float b) { return a != a || b != b ? kNan : b < a ? b : a; }
inline uint32_t byte_permute(uint32_t a, uint32_t b, uint32_t selector) {
  return __byte_perm(a, b, selector);
}

}  // namespace sagebwd::cuda::arch
