// SPDX-License-Identifier: Apache-2.0
// Row sums of dS in the fused backward, for calls that see a part of the keys: dQ is made from
// K - mean, and needs rowsum(dS)·mean beside it (query_sums.cu).
//
// The warps of a query strip add up what each has of its 32 keys, in a fixed order, and one of them
// adds that to global memory when it adds to dQ.
#pragma once

#include <cstddef>
#include <cstdint>

#include "cuda/arch/scalar.cuh"
#include "cuda/sm80/bwd/fused/codes.cuh"
#include "cuda/sm80/bwd/fused/shared.cuh"

namespace sagebwd::cuda::sm80::fused_backward {

template <Config kConfig>
struct RowSums {
  /// Before the first barrier: this warp's sums of dS·(logit factor of the query).
  /// With a cap that of the lane's query is given: of what the cap takes from dS, or of dS.
  __device__ static void share(const Thread<kConfig>& me, const Scores& y, float given,
                               int buffer) {
    if constexpr (kConfig.capped())
      put(me, given, buffer);
    else if constexpr (kMayBeWanted)
      if (me.p.row_sum != nullptr) add_up(me, y, buffer);
  }
  /// Behind the second barrier.
  __device__ static void add(const Thread<kConfig>& me, const Tile& tile, int buffer) {
    if constexpr (kMayBeWanted)
      if (me.p.row_sum != nullptr && me.key_strip() == 0) add_sums(me, tile, buffer);
  }

 private:
  using Plan = SharedPlan<kConfig>;
  static constexpr bool kMayBeWanted = kConfig.general();

  __device__ static void add_up(const Thread<kConfig>& me, const Scores& y, int buffer) {
    PerKey inverse;  // of the scale of K, which y carries in `paper`
    if constexpr (kConfig.paper()) me.get_key_scales(inverse);
#pragma unroll
    for (int m = 0; m < kKeyBlocks; ++m)
#pragma unroll
      for (int r = 0; r < 2; ++r)
        inverse[m][r] = kConfig.paper() ? arch::reciprocal_approx(inverse[m][r]) : 1.0f;
    float sum[2 * kQueryBlocks];
#pragma unroll
    for (int c = 0; c < 2 * kQueryBlocks; ++c) {
      sum[c] = 0.0f;
#pragma unroll
      for (int i = 0; i < 2 * kKeyBlocks; ++i)
        sum[c] = fmaf(y[i / 2][c / 2][i % 2 * 2 + c % 2], inverse[i / 2][i % 2], sum[c]);
    }
    const auto join = [](float a, float b) { return a + b; };
    halve<4>(sum, me.lane(), 16, join);
    halve<2>(sum, me.lane(), 8, join);
    halve<1>(sum, me.lane(), 4, join);
    put(me, sum[0], buffer);
  }
  __device__ static void put(const Thread<kConfig>& me, float sum, int buffer) {
    const QueryOfLane query = query_of_lane(me);
    at<float>(sums_at(me, buffer, me.key_strip()) + (query.block * 8 + query.column) * 4) = sum;
  }
  __device__ static void add_sums(const Thread<kConfig>& me, const Tile& tile, int buffer) {
    float sum = 0.0f;
#pragma unroll
    for (uint32_t strip = 0; strip < kConfig.key_strips; ++strip)
      sum += at<float>(sums_at(me, buffer, strip) + me.lane() * 4);
    atomicAdd(me.p.row_sum + tile.row + me.first_query() + me.lane(), sum);
  }
  __device__ static uint32_t sums_at(const Thread<kConfig>& me, int buffer, uint32_t key_strip) {
    const uint32_t strip = (buffer * kConfig.key_strips + key_strip) * kConfig.query_strips;
    return me.shared + static_cast<uint32_t>(offsetof(Plan, extras.row_sums)) +
           (strip + me.query_strip()) * kWarpQueries * 4;
  }
};

}  // namespace sagebwd::cuda::sm80::fused_backward
