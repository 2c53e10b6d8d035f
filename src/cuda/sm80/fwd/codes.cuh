// SPDX-License-Identifier: Apache-2.0
// Codes of P, rounded to nearest or by dither.
#pragma once

#include <cstdint>

#include "cuda/sm80/fwd/softmax.cuh"
#include "cuda/tile/codes.cuh"
#include "cuda/tile/dither.cuh"
#include "numerics/quantize.h"
#include "sagebwd/recipe.h"

namespace sagebwd::cuda::sm80::fwd {

inline constexpr int kDitherQueries = 128;  // queries of a tile, as dither counts tiles

/// What dither holds from tile to tile; nothing if P is rounded to nearest.
template <Config kConfig>
struct Dither {
  static constexpr bool kUsed = kConfig.rounding == Rounding::dither;
  tile::Uniforms<1> uniforms;
  PerRow query_term;

  __device__ void start(const Thread<kConfig>& me, const Work<kConfig>& w) {
    if constexpr (kUsed)
#pragma unroll
      for (int r = 0; r < 2; ++r)
        query_term[r] =
            tile::query_term(static_cast<uint32_t>(w.q0 + me.first_row() + 8 * r) % kDitherQueries);
  }

  /// Draws the uniforms of this tile and of those after it. Called for every tile.
  __device__ void draw(const Thread<kConfig>& me, int tile, bool first_tile) {
    if constexpr (kUsed)
      uniforms.draw(tile, first_tile, [&](int k_tile, int) {
        const Work<kConfig>& w = me.work();
        return numerics::dither_uniform(me.p.seed, w.s.index, w.head, w.q0 / kDitherQueries, k_tile,
                                        numerics::DitherOperand::p_forward);
      });
  }
};

/// Codes of levels·P.
template <Config kConfig>
__device__ void quantize(Codes<kConfig>& a, const Scores<kConfig>& x, const Thread<kConfig>& me,
                         const Dither<kConfig>& dither, int tile) {
  constexpr int kKeyBlocks = kConfig.key_blocks();
  if constexpr (!Dither<kConfig>::kUsed) {
    tile::quantize_rows<tile::Bytes::u8, kKeyBlocks>(a, x, 1.0f, 1.0f);
  } else {
    const float u = dither.uniforms(tile, 0);
    float held[kKeyBlocks / 4], key_term[kKeyBlocks][2];
#pragma unroll
    for (int i = 0; i < kKeyBlocks / 4; ++i)
      held[i] = tile::key_term(static_cast<uint32_t>(32 * i) + me.lane(), u);
    tile::spread_terms<kKeyBlocks>(key_term, held);
    // The exponential of a large logit may exceed the levels by more than a rounding.
    Scores<kConfig> y;
#pragma unroll
    for (int n = 0; n < kKeyBlocks; ++n)
#pragma unroll
      for (int e = 0; e < 4; ++e) y[n][e] = fminf(x[n][e], me.p.p_levels);
    tile::dither_rows<tile::Bytes::u8, kKeyBlocks>(a, y, 1.0f, 1.0f, dither.query_term, key_term);
  }
}

}  // namespace sagebwd::cuda::sm80::fwd
