// SPDX-License-Identifier: Apache-2.0
// Codes of dS for dQ that are rounded by dither (numerics/quantize.h), in every recipe but `paper`.
//
// Codes are floor(y + t), t = frac(term of the query + term of the key). Terms are fixed-point
// numbers of 16 bits, two to a word, so that their sum wraps around by itself. Behind the upper
// half of the bits of 128 they are the number 128 + t. y + 128 + t is positive: cut off and with
// its highest bit flipped, it is the code. Beside nearest rounding this takes an addition for two
// codes, an instruction that puts 16 bits behind others, and one for the highest bits of four
// codes. It differs from the oracle in fewer than two codes in 10^5, where y + t is next to an
// integer.
#pragma once

#include <cstddef>
#include <cstdint>
#include <type_traits>

#include "cuda/arch/convert.cuh"
#include "cuda/arch/scalar.cuh"
#include "cuda/sm80/bwd/fused/codes.cuh"
#include "cuda/sm80/bwd/fused/shared.cuh"
#include "cuda/tile/codes.cuh"
#include "numerics/quantize.h"

namespace sagebwd::cuda::sm80::fused_backward {

template <Config kConfig>
struct DqDither {
  // Fixed-point numbers of 32 bits, exact.
  static constexpr uint32_t kQuery = static_cast<uint32_t>(numerics::kDitherQuery * 0x1p32f),
                            kKey = static_cast<uint32_t>(numerics::kDitherKey * 0x1p32f);

  /// Before the loop: the terms of the thread's first query and key, and the first uniforms.
  __device__ static void start(const Thread<kConfig>& me, const Walk& w) {
    if constexpr (kConfig.dithers_dq()) {
      at<uint32_t>(terms_at(me)) =
          (me.first_query() + 2 * me.t()) * kQuery + static_cast<uint32_t>(me.key(0, 0)) * kKey;
      if (w.steps > 0) draw_for(me, w, w.steps);
    }
  }
  /// Before a tile begins, behind the second barrier of the last. `left` are the tiles from this
  /// one on.
  __device__ static void draw(const Thread<kConfig>& me, int left) {
    if constexpr (kConfig.dithers_dq())
      if (left % kTiles == kTiles - 1) draw_for(me, me.walk(), left);
  }
  /// Between the barriers: the term of a tile's first query and key of this thread.
  __device__ static uint32_t term(const Thread<kConfig>& me, int left) {
    return at<uint32_t>(terms_at(me)) + at<uint32_t>(uniforms_at(me) + left % kTiles * 4);
  }

 private:
  using Plan = SharedPlan<kConfig>;
  static constexpr int kTiles = 32;

  /// One warp draws the uniforms of the next tiles for all, because their hash is long: from
  /// `left` down to a multiple of kTiles.
  __device__ static void draw_for(const Thread<kConfig>& me, const Walk& w, int left) {
    if (me.warp() != 0) return;
    const int mine = left / kTiles * kTiles + static_cast<int>(me.lane());
    const Walk::Coordinates tile = w.template coordinates<kConfig>(me.p, w.steps - mine);
    const float u =
        numerics::dither_uniform(me.p.seed, w.s.index, tile.head, tile.query_tile,
                                 w.key0 / kConfig.tile_k(), numerics::DitherOperand::ds_query);
    at<uint32_t>(uniforms_at(me) + me.lane() * 4) = static_cast<uint32_t>(u * 0x1p32f);
  }
  __device__ static uint32_t terms_at(const Thread<kConfig>& me) {
    return me.shared + static_cast<uint32_t>(offsetof(Plan, dq_dither.terms)) + me.index * 4;
  }
  __device__ static uint32_t uniforms_at(const Thread<kConfig>& me) {
    return me.shared + static_cast<uint32_t>(offsetof(Plan, dq_dither.uniforms));
  }
};

/// RowScales with codes for dQ that are rounded by dither.
template <Config kConfig>
struct DqDitheredScales : RowScales<kConfig> {
  using Base = RowScales<kConfig>;
  using Dither = DqDither<kConfig>;

  /// Between the barriers.
  __device__ void make_codes(TileCodes& codes, const Scores& prob, const Scores& y,
                             int left) const {
    const Thread<kConfig>& me = this->me;
    PerKey p_inverse, ds_inverse;
    PerQuery query_inverse;
    this->key_inverses(p_inverse, this->maxima + Base::kP);
    this->key_inverses(ds_inverse, this->maxima + Base::kDs);
    this->query_inverses(query_inverse, this->maxima + Base::kQuery);
    const uint32_t term = Dither::term(me, left);
    quantize<tile::Bytes::u8>(codes.p, prob, p_inverse);
    put_key_codes(me, me.kPCodes, codes.p);
    quantize<tile::Bytes::s8>(codes.ds, y, ds_inverse);
    put_key_codes(me, me.kDsCodes, codes.ds);
    dither_queries(codes.query, y, query_inverse, term);
  }

 private:
  /// As quantize_queries (codes.cuh).
  __device__ void dither_queries(uint32_t (&mine)[2][4], const Scores& y, const PerQuery& inverse,
                                 uint32_t term) const {
    uint32_t keys[kKeyBlocks];  // terms of two keys
#pragma unroll
    for (uint32_t m = 0; m < kKeyBlocks; ++m)
      keys[m] = arch::byte_permute(term + 16 * m * Dither::kKey, term + (16 * m + 8) * Dither::kKey,
                                   0x7632);
#pragma unroll
    for (int n = 0; n < kQueryBlocks; n += 2) {
      uint32_t a[kKeyBlocks][2];
#pragma unroll
      for (int h = 0; h < 2; ++h)
#pragma unroll
        for (int m = 0; m < kKeyBlocks; ++m) {
          const float(&v)[4] = y[m][n + h];
          float z[4];
#pragma unroll
          for (uint32_t e = 0; e < 2; ++e) {
            const uint32_t both = keys[m] + twice((n + h) * 8 + e);
            z[e] = fmaf(v[e], inverse[e][n + h], behind_128(both, 0x7610));
            z[e + 2] = fmaf(v[e + 2], inverse[e][n + h], behind_128(both, 0x7632));
          }
          a[m][h] = arch::transpose_8x8(cut(z[0], z[2], z[1], z[3]) ^ 0x80808080u);
        }
      put_query_codes(this->me, n / 2, a);
#pragma unroll
      for (int i = 0; i < 4; ++i) mine[n / 2][i] = a[i / 2][i % 2];
    }
  }
  /// The term of a query, rounded to 16 bits, for two keys.
  __device__ static constexpr uint32_t twice(uint32_t query) {
    // The terms of keys were cut to 16 bits, which one more half makes up for.
    return (query * Dither::kQuery + 0x10000u) / 0x10000u * 0x10001u;
  }
  __device__ static float behind_128(uint32_t terms, uint32_t selector) {
    return __uint_as_float(arch::byte_permute(terms, __float_as_uint(128.0f), selector));
  }
  __device__ static uint32_t cut(float a, float b, float c, float d) {
#if __CUDA_ARCH__ >= 860
    return arch::cut_to_bytes<tile::Bytes::u8>(a, b, c, d);
#else
    // The last bit of 2^23 + x is that of one; rounded down, nothing is left behind the point.
    const auto whole = [](float x) { return __float_as_uint(__fadd_rd(x, 0x1p23f)); };
    return tile::pack(whole(a), whole(b), whole(c), whole(d));
#endif
  }
};

/// The scales and codes of an instance.
template <Config kConfig>
using Scales = std::conditional_t<
    kConfig.paper(), TileScales<kConfig>,
    std::conditional_t<kConfig.dithers_dq(), DqDitheredScales<kConfig>, RowScales<kConfig>>>;

}  // namespace sagebwd::cuda::sm80::fused_backward
