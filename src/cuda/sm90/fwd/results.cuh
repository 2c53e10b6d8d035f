// SPDX-License-Identifier: Apache-2.0
// From the sums to the caller's O and LSE.
#pragma once

#include <cmath>
#include <cstdint>

#include "cuda/sm90/fwd/softmax.cuh"
#include "cuda/tile/codes.cuh"
#include "cuda/tile/convert.cuh"
#include "cuda/tile/ordered.cuh"
#include "cuda/tile/quad.cuh"
#include "cuda/tile/sequence.cuh"
#include "numerics/quantize.h"

namespace sagebwd::cuda::sm90::fwd {

/// Writes a lane's two rows. row: the first, in the piece of work. references and logit_top: a
/// number per query of the piece.
template <typename T, int D, typename AnyWork>
__device__ void store(const Sums<D>& sums, const ForwardParams& p, const AnyWork& w,
                      const float* references, const float* logit_top, int row, uint32_t lane) {
  constexpr float kLn2 = static_cast<float>(numerics::kLn2);
  uint32_t best = 0;  // code of the largest logit (tile/ordered.cuh)
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    const int query = w.q0 + row + 8 * r;
    const float sum = tile::quad_sum(sums.sum[r]);
    const bool any = !(sum == 0.0f), real = query < w.s.nq;  // NaN counts
    const float inverse = any ? __fdividef(1.0f, sum) : 0.0f;
    const int64_t token = w.s.q_begin + query;
    T* out = tile::row_of<T>(p.o, w.s, w.head, token);
#pragma unroll
    for (int part = 0; part < D / 32; ++part) {
      uint32_t words[4];
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        const int i = 4 * (4 * part + j) + 2 * r;
        words[j] = tile::pack_16<T>(any ? tile::of_output<T>(sums.o[i] * inverse) : 0.0f,
                                    any ? tile::of_output<T>(sums.o[i + 1] * inverse) : 0.0f);
      }
      tile::store_quad(out + 32 * part, words, lane, p.o_chunks, real);
    }
    if (lane % 4 != 0 || !real) continue;
    *tile::stat_of(p.lse, w.s, w.head, token) =
        any ? kLn2 * (references[row + 8 * r] - kBias + log2f(sum)) : -INFINITY;
    if (p.max_logit != nullptr && any)
      best = max(best, tile::ordered(sum != sum ? sum : kLn2 * logit_top[row + 8 * r]));
  }
  if (p.max_logit == nullptr) return;
  best = __reduce_max_sync(0xffffffffu, best);
  if (lane == 0) atomicMax(p.max_logit + static_cast<int64_t>(w.s.index) * p.h + w.head, best);
}

}  // namespace sagebwd::cuda::sm90::fwd
