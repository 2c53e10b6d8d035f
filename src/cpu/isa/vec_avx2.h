// SPDX-License-Identifier: Apache-2.0
// Sixteen elements as two 256-bit registers. Meanings are those of vec_scalar.h.
#pragma once

#include <immintrin.h>

#include <cstdint>
#include <cstring>

#include "base/half.h"

namespace sagebwd::cpu::isa::avx2 {

struct Vec {
  __m256 lo, hi;
};
struct IVec {
  __m256i lo, hi;
};
struct Mask {
  __m256 lo, hi;
};

inline Vec load(const float* p) { return {_mm256_loadu_ps(p), _mm256_loadu_ps(p + 8)}; }
inline IVec load(const int32_t* p) {
  return {_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)),
          _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p + 8))};
}
inline Vec load(const bf16* p) {
  const auto* at = reinterpret_cast<const __m128i*>(p);
  const auto widen = [](__m128i x) {
    return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(x), 16));
  };
  return {widen(_mm_loadu_si128(at)), widen(_mm_loadu_si128(at + 1))};
}
inline Vec load(const f16* p) {
  const auto* at = reinterpret_cast<const __m128i*>(p);
  return {_mm256_cvtph_ps(_mm_loadu_si128(at)), _mm256_cvtph_ps(_mm_loadu_si128(at + 1))};
}
inline IVec load_codes(const int8_t* p) {
  const __m128i x = _mm_loadu_si128(reinterpret_cast<const __m128i*>(p));
  return {_mm256_cvtepi8_epi32(x), _mm256_cvtepi8_epi32(_mm_unpackhi_epi64(x, x))};
}
inline void store(float* p, Vec x) {
  _mm256_storeu_ps(p, x.lo);
  _mm256_storeu_ps(p + 8, x.hi);
}
inline void store(int32_t* p, IVec x) {
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), x.lo);
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(p + 8), x.hi);
}
inline Vec set1(float x) { return {_mm256_set1_ps(x), _mm256_set1_ps(x)}; }
inline IVec set1(int32_t x) { return {_mm256_set1_epi32(x), _mm256_set1_epi32(x)}; }

#define SAGE_PAIRWISE(type, name, op) \
  inline type name(type a, type b) { return {op(a.lo, b.lo), op(a.hi, b.hi)}; }
SAGE_PAIRWISE(Vec, add, _mm256_add_ps)
SAGE_PAIRWISE(Vec, sub, _mm256_sub_ps)
SAGE_PAIRWISE(Vec, mul, _mm256_mul_ps)
SAGE_PAIRWISE(Vec, div, _mm256_div_ps)
SAGE_PAIRWISE(Vec, max, _mm256_max_ps)
SAGE_PAIRWISE(Vec, min, _mm256_min_ps)
SAGE_PAIRWISE(IVec, add, _mm256_add_epi32)
SAGE_PAIRWISE(IVec, max_unsigned, _mm256_max_epu32)
#undef SAGE_PAIRWISE

inline Vec fma(Vec a, Vec b, Vec c) {
  return {_mm256_fmadd_ps(a.lo, b.lo, c.lo), _mm256_fmadd_ps(a.hi, b.hi, c.hi)};
}
inline Vec floor(Vec a) { return {_mm256_floor_ps(a.lo), _mm256_floor_ps(a.hi)}; }
inline IVec as_int(Vec a) { return {_mm256_castps_si256(a.lo), _mm256_castps_si256(a.hi)}; }
inline Vec as_float(IVec a) { return {_mm256_castsi256_ps(a.lo), _mm256_castsi256_ps(a.hi)}; }
inline IVec magnitude_bits(Vec a) {
  const __m256i mask = _mm256_set1_epi32(0x7fffffff);
  const IVec x = as_int(a);
  return {_mm256_and_si256(x.lo, mask), _mm256_and_si256(x.hi, mask)};
}
inline Vec to_float(IVec a) { return {_mm256_cvtepi32_ps(a.lo), _mm256_cvtepi32_ps(a.hi)}; }
inline IVec round_to_int(Vec a) { return {_mm256_cvtps_epi32(a.lo), _mm256_cvtps_epi32(a.hi)}; }
inline IVec shift_left_23(IVec a) {
  return {_mm256_slli_epi32(a.lo, 23), _mm256_slli_epi32(a.hi, 23)};
}
inline Mask in_range(IVec lo, IVec hi, int32_t x) {
  const __m256i v = _mm256_set1_epi32(x);
  // lo <= x  is  not (lo > x)
  return {_mm256_castsi256_ps(
              _mm256_andnot_si256(_mm256_cmpgt_epi32(lo.lo, v), _mm256_cmpgt_epi32(hi.lo, v))),
          _mm256_castsi256_ps(
              _mm256_andnot_si256(_mm256_cmpgt_epi32(lo.hi, v), _mm256_cmpgt_epi32(hi.hi, v)))};
}
inline Mask greater(Vec a, Vec b) {
  return {_mm256_cmp_ps(a.lo, b.lo, _CMP_GT_OQ), _mm256_cmp_ps(a.hi, b.hi, _CMP_GT_OQ)};
}
inline Vec select(Mask m, Vec a, Vec b) {
  return {_mm256_blendv_ps(b.lo, a.lo, m.lo), _mm256_blendv_ps(b.hi, a.hi, m.hi)};
}
inline Vec flip_signs(Vec a, uint16_t flipped) {
  const __m256i bit = _mm256_setr_epi32(1, 2, 4, 8, 16, 32, 64, 128);
  const auto flip = [&](__m256 x, int bits) {
    const __m256i chosen = _mm256_cmpeq_epi32(_mm256_and_si256(_mm256_set1_epi32(bits), bit), bit);
    return _mm256_xor_ps(x, _mm256_and_ps(_mm256_castsi256_ps(chosen), _mm256_set1_ps(-0.0f)));
  };
  return {flip(a.lo, flipped & 255), flip(a.hi, flipped >> 8)};
}
template <int kStep>
inline __m256 butterfly(__m256 a) {
  if constexpr (kStep == 1) {
    const __m256 b = _mm256_permute_ps(a, 0xb1);
    return _mm256_blend_ps(_mm256_add_ps(a, b), _mm256_sub_ps(b, a), 0xaa);
  } else if constexpr (kStep == 2) {
    const __m256 b = _mm256_permute_ps(a, 0x4e);
    return _mm256_blend_ps(_mm256_add_ps(a, b), _mm256_sub_ps(b, a), 0xcc);
  } else {
    const __m256 b = _mm256_permute2f128_ps(a, a, 1);
    return _mm256_blend_ps(_mm256_add_ps(a, b), _mm256_sub_ps(b, a), 0xf0);
  }
}
template <int kStep>
inline Vec butterfly(Vec a) {
  if constexpr (kStep == 8)
    return {_mm256_add_ps(a.lo, a.hi), _mm256_sub_ps(a.lo, a.hi)};
  else
    return {butterfly<kStep>(a.lo), butterfly<kStep>(a.hi)};
}
inline void store_bytes(void* p, IVec x) {
  // The low byte of each element to the front of its 128-bit half, then the four 32-bit pieces
  // together.
  const __m256i pick =
      _mm256_setr_epi8(0, 4, 8, 12, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1, 0, 4, 8, 12, -1,
                       -1, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1);
  const __m256i lo = _mm256_shuffle_epi8(x.lo, pick);
  const __m256i hi = _mm256_shuffle_epi8(x.hi, pick);
  const __m256i both = _mm256_unpacklo_epi32(lo, hi);  // [lo0 hi0 .. | lo1 hi1 ..]
  const __m128i a = _mm256_castsi256_si128(both);
  const __m128i b = _mm256_extracti128_si256(both, 1);
  const __m128i mixed = _mm_unpacklo_epi32(a, b);  // lo0 lo1 hi0 hi1
  _mm_storeu_si128(static_cast<__m128i*>(p), mixed);
}
inline __m256i narrow(__m256i a, __m256i b, __m256i c, __m256i d) {
  // The packs work inside 128-bit halves; the permutation restores the order of the fours.
  const __m256i x = _mm256_packs_epi16(_mm256_packs_epi32(a, b), _mm256_packs_epi32(c, d));
  return _mm256_permutevar8x32_epi32(x, _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7));
}
inline void store_codes(void* p, const IVec (&x)[4], uint8_t flip) {
  const __m256i f = _mm256_set1_epi8(static_cast<char>(flip));
  _mm256_storeu_si256(static_cast<__m256i*>(p),
                      _mm256_xor_si256(narrow(x[0].lo, x[0].hi, x[1].lo, x[1].hi), f));
  _mm256_storeu_si256(static_cast<__m256i*>(p) + 1,
                      _mm256_xor_si256(narrow(x[2].lo, x[2].hi, x[3].lo, x[3].hi), f));
}
/// Up to 127, what vpmaddubsw takes.
inline void store_unsigned(void* p, const IVec (&x)[4]) { store_codes(p, x, 0); }
inline __m256i quad_bytes(__m256i a, __m256i b, __m256i c, __m256i d) {
  const __m256i low = _mm256_set1_epi32(255);
  const __m256i ab =
      _mm256_or_si256(_mm256_and_si256(a, low), _mm256_slli_epi32(_mm256_and_si256(b, low), 8));
  const __m256i cd = _mm256_or_si256(_mm256_and_si256(c, low), _mm256_slli_epi32(d, 8));
  return _mm256_blend_epi16(ab, _mm256_slli_epi32(cd, 16), 0xaa);
}
inline void store_quads(void* p, IVec a, IVec b, IVec c, IVec d) {
  _mm256_storeu_si256(static_cast<__m256i*>(p), quad_bytes(a.lo, b.lo, c.lo, d.lo));
  _mm256_storeu_si256(static_cast<__m256i*>(p) + 1, quad_bytes(a.hi, b.hi, c.hi, d.hi));
}
/// 8×8 elements: 2×2 of elements, then of pairs, inside each 128-bit half; then 2×2 of halves.
inline void transpose(__m256i (&x)[8]) {
  __m256i y[8];
#pragma GCC unroll 4
  for (int i = 0; i < 8; i += 2) {
    y[i] = _mm256_unpacklo_epi32(x[i], x[i + 1]);
    y[i + 1] = _mm256_unpackhi_epi32(x[i], x[i + 1]);
  }
#pragma GCC unroll 2
  for (int i = 0; i < 8; i += 4) {
    x[i] = _mm256_unpacklo_epi64(y[i], y[i + 2]);
    x[i + 1] = _mm256_unpackhi_epi64(y[i], y[i + 2]);
    x[i + 2] = _mm256_unpacklo_epi64(y[i + 1], y[i + 3]);
    x[i + 3] = _mm256_unpackhi_epi64(y[i + 1], y[i + 3]);
  }
#pragma GCC unroll 4
  for (int i = 0; i < 4; ++i) {
    const __m256i a = x[i], b = x[i + 4];
    x[i] = _mm256_permute2x128_si256(a, b, 0x20);
    x[i + 4] = _mm256_permute2x128_si256(a, b, 0x31);
  }
}
inline void transpose(IVec (&x)[16]) {
  __m256i corner[2][2][8];  // [upper, lower][left, right]
  for (int i = 0; i < 8; ++i) {
    corner[0][0][i] = x[i].lo, corner[0][1][i] = x[i].hi;
    corner[1][0][i] = x[i + 8].lo, corner[1][1][i] = x[i + 8].hi;
  }
  for (auto& half : corner)
    for (auto& c : half) transpose(c);
  for (int i = 0; i < 8; ++i)
    x[i] = {corner[0][0][i], corner[1][0][i]}, x[i + 8] = {corner[0][1][i], corner[1][1][i]};
}
inline uint32_t reduce_max_unsigned(IVec a) {
  const __m256i m8 = _mm256_max_epu32(a.lo, a.hi);
  __m128i m4 = _mm_max_epu32(_mm256_castsi256_si128(m8), _mm256_extracti128_si256(m8, 1));
  m4 = _mm_max_epu32(m4, _mm_shuffle_epi32(m4, 0x4e));
  m4 = _mm_max_epu32(m4, _mm_shuffle_epi32(m4, 0xb1));
  return static_cast<uint32_t>(_mm_cvtsi128_si32(m4));
}
inline float reduce_add(Vec a) {
  const __m256 s8 = _mm256_add_ps(a.lo, a.hi);
  __m128 s4 = _mm_add_ps(_mm256_castps256_ps128(s8), _mm256_extractf128_ps(s8, 1));
  s4 = _mm_add_ps(s4, _mm_movehl_ps(s4, s4));
  return _mm_cvtss_f32(_mm_add_ss(s4, _mm_shuffle_ps(s4, s4, 1)));
}

// vpmaddubsw multiplies unsigned by signed bytes and adds pairs with 16-bit saturation: exact while
// the unsigned ones are within 127 and the signed ones within ±128.
struct Quads {
  __m256i lo, hi;
};
inline Quads load_quads(const void* p) {
  return {_mm256_loadu_si256(static_cast<const __m256i*>(p)),
          _mm256_loadu_si256(static_cast<const __m256i*>(p) + 1)};
}
inline __m256i broadcast_quad(const void* a) {
  int32_t w;
  std::memcpy(&w, a, 4);
  return _mm256_set1_epi32(w);
}
inline __m256i add_quads(__m256i acc, __m256i unsigned_bytes, __m256i signed_bytes) {
  const __m256i pairs = _mm256_maddubs_epi16(unsigned_bytes, signed_bytes);
  return _mm256_add_epi32(acc, _mm256_madd_epi16(pairs, _mm256_set1_epi16(1)));
}
inline IVec dot_us(IVec acc, __m256i a, Quads b) {
  return {add_quads(acc.lo, a, b.lo), add_quads(acc.hi, a, b.hi)};
}
inline IVec dot_su(IVec acc, __m256i a, Quads b) {
  return {add_quads(acc.lo, b.lo, a), add_quads(acc.hi, b.hi, a)};
}

// Signed by signed. Where a < 0, a·b = |a|·(-b) = |a|·(~b) + |a|. So with the sign of a as a mask
// the product is |a|·(b XOR mask), and what is missing is a number of the row alone: the sum of its
// negative magnitudes. XOR runs on every vector port; vpsignb, the obvious way, on the two that the
// multiplications need.
struct SplitQuad {
  __m256i magnitude, mask;
};
inline IVec dot_split(IVec acc, SplitQuad a, Quads b) {
  return {add_quads(acc.lo, a.magnitude, _mm256_xor_si256(b.lo, a.mask)),
          add_quads(acc.hi, a.magnitude, _mm256_xor_si256(b.hi, a.mask))};
}
/// Splits k (a multiple of 32) codes into magnitudes and masks. Returns the sum of the negative
/// magnitudes.
inline int32_t split_row(const int8_t* codes, int k, uint8_t* magnitudes, uint8_t* masks) {
  const __m256i zero = _mm256_setzero_si256();
  __m256i sum = zero;
  for (int i = 0; i < k; i += 32) {
    const __m256i a = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(codes + i));
    const __m256i magnitude = _mm256_abs_epi8(a);
    const __m256i mask = _mm256_cmpgt_epi8(zero, a);
    sum = _mm256_add_epi64(sum, _mm256_sad_epu8(_mm256_and_si256(magnitude, mask), zero));
    _mm256_store_si256(reinterpret_cast<__m256i*>(magnitudes + i), magnitude);
    _mm256_store_si256(reinterpret_cast<__m256i*>(masks + i), mask);
  }
  const __m128i two = _mm_add_epi64(_mm256_castsi256_si128(sum), _mm256_extracti128_si256(sum, 1));
  return _mm_cvtsi128_si32(_mm_add_epi64(two, _mm_unpackhi_epi64(two, two)));
}

}  // namespace sagebwd::cpu::isa::avx2
