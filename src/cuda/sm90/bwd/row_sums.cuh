// SPDX-License-Identifier: Apache-2.0
// Row sums of dS, for calls that see a part of the keys: dQ is made from K - mean, and needs
// rowsum(dS)·mean beside it (tuned/query_sums.cu).
//
// They are sums of what the codes of dS are made from, and not of the codes: the mean of K may be
// much larger than K - mean, and so would be an error of the sum.
#pragma once

#include <cstdint>

#include "cuda/arch/mma_sync.cuh"
#include "cuda/sm90/bwd/work.cuh"
#include "cuda/sm90/formats.h"

namespace sagebwd::cuda::sm90::bwd {

/// Those of a warp's 16 queries over the keys of the block.
template <bool kMayBeWanted>
class RowSums {
 public:
  /// to: [h, tq], or null
  __device__ RowSums(float* to, uint32_t lane) : to_(to), lane_(lane) {}

  /// A new tile. lift: that of dQ, of the lane's two queries.
  __device__ __forceinline__ void start(const float (&lift)[2]) {
    unit_[0] = lift[0] * kDqShift, unit_[1] = lift[1] * kDqShift;
  }
  /// dS as A operands of 16 keys each: a product with ones adds it up in FP32, and every column of
  /// the result is the row sum.
  __device__ __forceinline__ void take(const uint32_t (&ds)[32]) {
    if (to_ == nullptr) return;
    constexpr uint32_t kOnes = 0x3c003c00u;
#pragma unroll
    for (float& x : sum_) x = 0.0f;
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      const uint32_t a[4] = {ds[4 * i], ds[4 * i + 1], ds[4 * i + 2], ds[4 * i + 3]};
      arch::mma_16<__half>(sum_, a, kOnes, kOnes);
    }
  }
  /// Adds them to those of other keys. row: the first of the warp's queries.
  __device__ __forceinline__ void add(uint32_t row) const {
    if (lane_ % 4 != 0 || to_ == nullptr) return;
    float* const to = to_ + row + lane_ / 4;
    atomicAdd(to, sum_[0] * unit_[0]);
    atomicAdd(to + 8, sum_[2] * unit_[1]);
  }

 private:
  float* to_;
  uint32_t lane_;
  float unit_[2];
  float sum_[4];
};

/// Nobody wants them.
template <>
class RowSums<false> {
 public:
  __device__ RowSums(float*, uint32_t) {}
  __device__ __forceinline__ void start(const float (&)[2]) {}
  __device__ __forceinline__ void take(const uint32_t (&)[32]) {}
  __device__ __forceinline__ void add(uint32_t) const {}
};

}  // namespace sagebwd::cuda::sm90::bwd
