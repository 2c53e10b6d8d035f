// SPDX-License-Identifier: Apache-2.0
// The scores of a tile: S = Q8·K8ᵀ, what makes logits of them, and the mask.
#pragma once

#include <cmath>
#include <cstddef>
#include <cstdint>

#include "cuda/arch/mma_sync.cuh"
#include "cuda/sm80/fwd/shared.cuh"
#include "cuda/tile/codes.cuh"
#include "cuda/tile/shared_tile.cuh"
#include "numerics/octaves.h"

namespace sagebwd::cuda::sm80::fwd {

/// What a lane holds of its warp's queries.
template <Config kConfig>
struct Queries {
  uint32_t q8[kConfig.d / 32][4];  // A operands
  PerRow logit_factor;
  PerRow centre;  // of the octave that is visited: logits of its centre, in log2 units
  int octave = -1;

  __device__ void load(const Thread<kConfig>& me, const Work<kConfig>& w) {
    constexpr int D = kConfig.d;
    const int64_t row = w.head * me.p.tq + w.s.q_pad + w.q0 + me.first_row();
    const int8_t* q = me.p.q8 + row * D + 4 * me.t();
#pragma unroll
    for (int k = 0; k < D / 32; ++k)
#pragma unroll
      for (int r = 0; r < 4; ++r)
        q8[k][r] = *reinterpret_cast<const uint32_t*>(q + (r & 1) * 8 * D + k * 32 + (r >> 1) * 16);
#pragma unroll
    for (int r = 0; r < 2; ++r) logit_factor[r] = me.p.logit_factor[row + 8 * r];
  }
};

/// Finds the logits of the centre of an octave. All columns of the product are that centre, so
/// every lane gets the sums of its rows.
template <Config kConfig>
__device__ void enter_octave(Queries<kConfig>& queries, const Thread<kConfig>& me, int octave) {
  const Work<kConfig>& w = me.work();
  const tuned::Centres& centres = me.p.centres;
  const int64_t row =
      centres.row(w.head / me.p.group, w.s.k_pad / kBlock, numerics::first_block_of(octave));
  queries.octave = octave;
  const int8_t* codes = centres.codes + row * me.p.d;
  const float scale = centres.scale[row];
  int sum[4];
#pragma unroll
  for (int k = 0; k < kConfig.d / 32; ++k) {
    uint32_t b[2];
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const int channel = k * 32 + r * 16 + 4 * static_cast<int>(me.t());
      b[r] = channel < me.p.d ? *reinterpret_cast<const uint32_t*>(codes + channel) : 0;
    }
    k == 0 ? tile::start_sum(sum, queries.q8[0], b[0], b[1])
           : arch::mma_8(sum, queries.q8[k], b[0], b[1]);
  }
#pragma unroll
  for (int r = 0; r < 2; ++r)
    queries.centre[r] =
        __fmul_rn(__fmul_rn(tile::sum_of(sum[2 * r]), scale), queries.logit_factor[r]);
}

/// x = (Q8·K8ᵀ)·(scale of K).
template <Config kConfig>
__device__ void multiply_qk(Scores<kConfig>& x, const Thread<kConfig>& me,
                            const Queries<kConfig>& queries, int stage) {
  using Stage = typename SharedPlan<kConfig>::Stage;
  constexpr int D = kConfig.d, kKeyBlocks = kConfig.key_blocks();
  const uint32_t k8 = me.stage_at(stage) + me.key_offset;
  int acc[kKeyBlocks][4];
#pragma unroll
  for (int k = 0; k < D / 32; ++k)
#pragma unroll
    for (int n = 0; n < kKeyBlocks; n += 2) {
      uint32_t b[4];
      arch::ldmatrix_x4(b, tile::step_of(k8, k) + n * 8 * D);
#pragma unroll
      for (int h = 0; h < 2; ++h)
        k == 0 ? tile::start_sum(acc[n + h], queries.q8[0], b[2 * h], b[2 * h + 1])
               : arch::mma_8(acc[n + h], queries.q8[k], b[2 * h], b[2 * h + 1]);
    }
#pragma unroll
  for (int n = 0; n < kKeyBlocks; ++n) {
    const float4 ks =  // scale, offset; of two keys
        at<float4>(me.stage_at(stage) + offsetof(Stage, k_scale) + me.t() * 16 + n * 64);
#pragma unroll
    for (int e = 0; e < 4; ++e)
      x[n][e] = tile::scaled_sum(acc[n][e], e & 1 ? ks.z : ks.x, e & 1 ? ks.w : ks.y);
  }
}

/// Makes -inf of what the mask hides.
template <Config kConfig>
__device__ void hide(Scores<kConfig>& x, const Thread<kConfig>& me, int tile) {
  const int key0 = tile * kConfig.tile_k + static_cast<int>(2 * me.t());
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    // How far the key lies inside the band of the query.
    const uint32_t here = static_cast<uint32_t>(key0 - me.band_of(r)), width = me.seen(r);
#pragma unroll
    for (int n = 0; n < kConfig.key_blocks(); ++n)
#pragma unroll
      for (int e = 0; e < 2; ++e)
        if (here + n * 8 + e >= width) x[n][2 * r + e] = -INFINITY;
  }
}

}  // namespace sagebwd::cuda::sm80::fwd
