// SPDX-License-Identifier: Apache-2.0
// Sums of many floats that are rounded once, at the end.
#pragma once

#include <type_traits>

#include "cuda/arch/target.cuh"

namespace sagebwd::cuda::tuned {

/// A sum of floats with twice their precision, which also adds up the errors of the additions
/// (Knuth's two-sum), for GPUs where FP64 is slow.
struct PairSum {
  float high = 0.0f, low = 0.0f;
  __device__ __forceinline__ void add(float x) {
    const float sum = high + x, part = sum - high;
    low += (high - (sum - part)) + (x - part);
    high = sum;
  }
  __device__ double value() const { return static_cast<double>(high) + static_cast<double>(low); }
};

/// The same where FP64 is fast.
struct DoubleSum {
  double sum = 0;
  __device__ __forceinline__ void add(float x) { sum += static_cast<double>(x); }
  __device__ double value() const { return sum; }
};

using LongSum = std::conditional_t<arch::kTarget / 10 == 90, DoubleSum, PairSum>;

/// A larger sum may have been infinite on the way.
inline constexpr double kLargestSum = 0x1p127;

}  // namespace sagebwd::cuda::tuned
