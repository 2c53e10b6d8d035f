// SPDX-License-Identifier: Apache-2.0
// Rounding by dither in the fused backward (tile/dither.cuh): recipe `paper`.
//
// Codes of dS for dK and for dQ are rounded apart, each with an offset of its own. The terms of the
// queries are the same for every tile. The uniforms are the same for all warps: one warp draws
// those of eight tiles at a time, because their hash is long.
#pragma once

#include <cstddef>
#include <cstdint>
#include <type_traits>

#include "cuda/sm80/bwd/fused/codes.cuh"
#include "cuda/sm80/bwd/fused/dither_dq.cuh"
#include "cuda/sm80/bwd/fused/shared.cuh"
#include "cuda/tile/dither.cuh"
#include "numerics/quantize.h"

namespace sagebwd::cuda::sm80::fused_backward {

template <Config kConfig>
struct Dither {
  using Operand = numerics::DitherOperand;

  __device__ static void start(const Thread<kConfig>& me) {
    if constexpr (kConfig.policy == Policy::dither)
      if (me.index < kConfig.tile_q())
        at<float>(terms_at(me) + me.index * 4) = tile::query_term(me.index);
  }
  /// When a tile begins. `left` are the tiles from this one on.
  __device__ static void draw(const Thread<kConfig>& me, int left) {
    if constexpr (kConfig.policy == Policy::dither) {
      const Walk& w = me.walk();
      const int step = w.steps - left;
      if (step % kTiles != 0 || me.warp() != 0) return;
      const Walk::Coordinates tile =
          w.template coordinates<kConfig>(me.p, step + static_cast<int>(me.lane() / kOperands));
      at<float>(uniforms_at(me) + me.lane() * 4) = numerics::dither_uniform(
          me.p.seed, w.s.index, tile.head, tile.query_tile, w.key0 / kConfig.tile_k(),
          static_cast<Operand>(me.lane() % kOperands));
    }
  }
  /// Between the barriers: x·inverse with the offsets of an operand, ready for rounding to nearest.
  __device__ static void apply(Scores& y, const Scores& x, float inverse, const Thread<kConfig>& me,
                               int left, Operand operand) {
    const uint32_t slot = (me.walk().steps - left) % kTiles * kOperands + uint32_t(operand);
    const float u = at<float>(uniforms_at(me) + slot * 4);
    float key[kKeyBlocks][2];
    tile::spread_row_terms(key, tile::key_term(me.key_strip() * kWarpKeys + me.lane(), u));
    const uint32_t terms = terms_at(me) + (me.first_query() + 2 * me.t()) * 4;
    inverse *= tile::kInside;
#pragma unroll
    for (int n = 0; n < kQueryBlocks; ++n) {
      const float2 query = at<float2>(terms + n * 32);
#pragma unroll
      for (int m = 0; m < kKeyBlocks; ++m)
#pragma unroll
        for (int e = 0; e < 4; ++e)
          y[m][n][e] = fmaf(x[m][n][e], inverse,
                            tile::dither_offset(e & 1 ? query.y : query.x, key[m][e >> 1]));
    }
  }

 private:
  static constexpr int kTiles = 8, kOperands = 32 / kTiles;
  __device__ static uint32_t terms_at(const Thread<kConfig>& me) {
    return me.shared + static_cast<uint32_t>(offsetof(SharedPlan<kConfig>, dither.query_terms));
  }
  __device__ static uint32_t uniforms_at(const Thread<kConfig>& me) {
    return me.shared + static_cast<uint32_t>(offsetof(SharedPlan<kConfig>, dither.uniforms));
  }
};

/// The codes of `paper` rounded by dither.
template <Config kConfig>
struct DitheredScales : TileScales<kConfig> {
  using Base = TileScales<kConfig>;

  /// Between the barriers.
  __device__ void make_codes(TileCodes& codes, const Scores& prob, const Scores& y,
                             int left) const {
    using enum numerics::DitherOperand;
    const Thread<kConfig>& me = this->me;
    const PerKey ones = {{1.0f, 1.0f}, {1.0f, 1.0f}};
    Scores z;
    Dither<kConfig>::apply(z, prob, arch::reciprocal_approx(this->p_scale()), me, left, p_backward);
    quantize<tile::Bytes::u8>(codes.p, z, ones);
    put_key_codes(me, me.kPCodes, codes.p);
    const float inverse = arch::reciprocal_approx(this->ds_scale());
    Dither<kConfig>::apply(z, y, inverse, me, left, ds_key);
    quantize<tile::Bytes::s8>(codes.ds, z, ones);
    put_key_codes(me, me.kDsCodes, codes.ds);
    const PerQuery one_per_query = {{1.0f, 1.0f, 1.0f, 1.0f}, {1.0f, 1.0f, 1.0f, 1.0f}};
    Dither<kConfig>::apply(z, y, inverse, me, left, ds_query);
    quantize_queries(me, codes.query, z, one_per_query);
  }
};

/// The scales and codes of an instance.
template <Config kConfig>
using Scales = std::conditional_t<
    kConfig.scheme == Scheme::vectorwise,
    std::conditional_t<kConfig.dithers_dq, DqDitheredScales<kConfig>, RowScales<kConfig>>,
    std::conditional_t<kConfig.policy == Policy::dither, DitheredScales<kConfig>,
                       TileScales<kConfig>>>;

}  // namespace sagebwd::cuda::sm80::fused_backward
