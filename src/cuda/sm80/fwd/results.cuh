// SPDX-License-Identifier: Apache-2.0
// From the sums to the caller's tensors: O, LSE and the largest logit.
#pragma once

#include <cmath>
#include <cstddef>
#include <cstdint>

#include "cuda/sm80/fwd/softmax.cuh"
#include "cuda/tile/codes.cuh"
#include "cuda/tile/convert.cuh"
#include "cuda/tile/ordered.cuh"
#include "cuda/tile/sequence.cuh"
#include "numerics/quantize.h"

namespace sagebwd::cuda::sm80::fwd {

/// Writes row r of the lane. Returns the code of its largest logit (tile/ordered.cuh), 0 if there
/// is none or another lane of the row has it.
template <typename T, Config kConfig>
__device__ uint32_t store_row(const Accumulators<kConfig>& sums, const Thread<kConfig>& me, int r) {
  const ForwardParams& p = me.p;
  const bool any = !(sums.sum[r] == 0.0f);  // NaN counts
  const float inverse = any ? 1.0f / sums.sum[r] : 0.0f;
  const tile::Sequence& s = me.work().s;
  const int64_t token = s.q_begin + me.query(r);
  T* out = tile::row_of<T>(p.o, s, me.work().head, token);
#pragma unroll
  for (int c = 0; c < kConfig.channel_blocks(); ++c) {
    const int channel = c * 8 + static_cast<int>(2 * me.t());
    if (channel >= p.d) break;
    const float low = sums.o[c][2 * r] * inverse, high = sums.o[c][2 * r + 1] * inverse;
    tile::store_pair(out + channel, any ? tile::of_output<T>(low) : 0.0f,
                     any ? tile::of_output<T>(high) : 0.0f, p.o.vector);
  }
  if (me.t() != 0) return 0;
  constexpr float kLn2 = static_cast<float>(numerics::kLn2);
  float mean_logit = 0.0f;  // what the logits lack
  if constexpr (kConfig.paper)
    mean_logit = p.q_mean_logit[me.work().head * p.tq + s.q_pad + me.query(r)];
  *tile::stat_of(p.lse, s, me.work().head, token) =
      any ? kLn2 * (sums.reference[r] + log2f(sums.sum[r])) + mean_logit : -INFINITY;
  return any ? tile::ordered(sums.sum[r] != sums.sum[r] ? sums.sum[r]
                                                        : kLn2 * me.logit_top(r) + mean_logit)
             : 0;
}

template <typename T, Config kConfig>
__device__ void store(Accumulators<kConfig>& sums, const Thread<kConfig>& me) {
  const ForwardParams& p = me.p;
  uint32_t best = 0;
  __syncwarp();  // the sums of all rows are there
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    sums.sum[r] =
        (kConfig.has_centres() ? me.sum_before(r) : tile::quad_sum(sums.sum[r])) * p.p_unit;
    if (me.query(r) < me.work().s.nq) best = max(best, store_row<T>(sums, me, r));
  }
  if (p.max_logit == nullptr) return;
  best = __reduce_max_sync(0xffffffffu, best);
  if (me.lane() == 0)
    atomicMax(p.max_logit + static_cast<int64_t>(me.work().s.index) * gridDim.y + me.work().head,
              best);
}

}  // namespace sagebwd::cuda::sm80::fwd
