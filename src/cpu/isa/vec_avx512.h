// SPDX-License-Identifier: Apache-2.0
// Sixteen elements as one 512-bit register. Meanings are those of vec_scalar.h.
#pragma once

#include <immintrin.h>

#include <cstdint>
#include <cstring>

#include "base/half.h"

namespace sagebwd::cpu::isa::avx512 {

using Vec = __m512;
using IVec = __m512i;
using Mask = __mmask16;

inline Vec load(const float* p) { return _mm512_loadu_ps(p); }
inline IVec load(const int32_t* p) { return _mm512_loadu_si512(p); }
inline Vec load(const bf16* p) {
  const __m256i x = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p));
  return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(x), 16));
}
inline Vec load(const f16* p) {
  return _mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
}
inline IVec load_codes(const int8_t* p) {
  return _mm512_cvtepi8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
}
inline void store(float* p, Vec x) { _mm512_storeu_ps(p, x); }
inline void store(int32_t* p, IVec x) { _mm512_storeu_si512(p, x); }
inline Vec set1(float x) { return _mm512_set1_ps(x); }
inline IVec set1(int32_t x) { return _mm512_set1_epi32(x); }
inline Vec add(Vec a, Vec b) { return _mm512_add_ps(a, b); }
inline Vec sub(Vec a, Vec b) { return _mm512_sub_ps(a, b); }
inline Vec mul(Vec a, Vec b) { return _mm512_mul_ps(a, b); }
inline Vec div(Vec a, Vec b) { return _mm512_div_ps(a, b); }
inline Vec fma(Vec a, Vec b, Vec c) { return _mm512_fmadd_ps(a, b, c); }
inline Vec max(Vec a, Vec b) { return _mm512_max_ps(a, b); }
inline Vec min(Vec a, Vec b) { return _mm512_min_ps(a, b); }
inline Vec floor(Vec a) {
  return _mm512_roundscale_ps(a, _MM_FROUND_TO_NEG_INF | _MM_FROUND_NO_EXC);
}
inline IVec add(IVec a, IVec b) { return _mm512_add_epi32(a, b); }
inline IVec max_unsigned(IVec a, IVec b) { return _mm512_max_epu32(a, b); }
inline IVec as_int(Vec a) { return _mm512_castps_si512(a); }
inline Vec as_float(IVec a) { return _mm512_castsi512_ps(a); }
inline IVec magnitude_bits(Vec a) {
  return _mm512_and_si512(as_int(a), _mm512_set1_epi32(0x7fffffff));
}
inline Vec to_float(IVec a) { return _mm512_cvtepi32_ps(a); }
inline IVec round_to_int(Vec a) { return _mm512_cvtps_epi32(a); }
inline IVec shift_left_23(IVec a) { return _mm512_slli_epi32(a, 23); }
inline Mask in_range(IVec lo, IVec hi, int32_t x) {
  const IVec v = _mm512_set1_epi32(x);
  return _mm512_mask_cmplt_epi32_mask(_mm512_cmple_epi32_mask(lo, v), v, hi);
}
inline Mask greater(Vec a, Vec b) { return _mm512_cmp_ps_mask(a, b, _CMP_GT_OQ); }
inline Vec select(Mask m, Vec a, Vec b) { return _mm512_mask_blend_ps(m, b, a); }
inline Vec flip_signs(Vec a, uint16_t flipped) {
  return _mm512_mask_xor_ps(a, flipped, a, _mm512_set1_ps(-0.0f));
}
template <int kStep>
inline Vec butterfly(Vec a) {
  if constexpr (kStep == 1) {
    const Vec b = _mm512_permute_ps(a, 0xb1);
    return _mm512_mask_sub_ps(_mm512_add_ps(a, b), 0xaaaa, b, a);
  } else if constexpr (kStep == 2) {
    const Vec b = _mm512_permute_ps(a, 0x4e);
    return _mm512_mask_sub_ps(_mm512_add_ps(a, b), 0xcccc, b, a);
  } else if constexpr (kStep == 4) {
    const Vec b = _mm512_shuffle_f32x4(a, a, 0xb1);
    return _mm512_mask_sub_ps(_mm512_add_ps(a, b), 0xf0f0, b, a);
  } else {
    const Vec b = _mm512_shuffle_f32x4(a, a, 0x4e);
    return _mm512_mask_sub_ps(_mm512_add_ps(a, b), 0xff00, b, a);
  }
}
inline void store_bytes(void* p, IVec x) {
  _mm_storeu_si128(static_cast<__m128i*>(p), _mm512_cvtepi32_epi8(x));
}
// The packs work inside 128-bit quarters; this restores the order of the fours.
inline IVec in_order(IVec x) {
  return _mm512_permutexvar_epi32(
      _mm512_setr_epi32(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15), x);
}
inline void store_codes(void* p, const IVec (&x)[4], uint8_t flip) {
  const IVec y = _mm512_packs_epi16(_mm512_packs_epi32(x[0], x[1]), _mm512_packs_epi32(x[2], x[3]));
  _mm512_storeu_si512(p, _mm512_xor_si512(in_order(y), _mm512_set1_epi8(static_cast<char>(flip))));
}
inline void store_unsigned(void* p, const IVec (&x)[4]) {
  _mm512_storeu_si512(p, in_order(_mm512_packus_epi16(_mm512_packs_epi32(x[0], x[1]),
                                                      _mm512_packs_epi32(x[2], x[3]))));
}
inline void store_quads(void* p, IVec a, IVec b, IVec c, IVec d) {
  const IVec ab = _mm512_mask_blend_epi8(0x2222222222222222ull, a, _mm512_slli_epi32(b, 8));
  const IVec cd = _mm512_mask_blend_epi8(0x8888888888888888ull, _mm512_slli_epi32(c, 16),
                                         _mm512_slli_epi32(d, 24));
  _mm512_storeu_si512(p, _mm512_mask_blend_epi16(0xaaaaaaaau, ab, cd));
}
inline void transpose(IVec (&x)[16]) {
  IVec y[16];
  // 2×2 of elements, then of pairs, inside each 128-bit quarter; then 4×4 of quarters.
#pragma GCC unroll 8
  for (int i = 0; i < 16; i += 2) {
    y[i] = _mm512_unpacklo_epi32(x[i], x[i + 1]);
    y[i + 1] = _mm512_unpackhi_epi32(x[i], x[i + 1]);
  }
#pragma GCC unroll 4
  for (int i = 0; i < 16; i += 4) {
    x[i] = _mm512_unpacklo_epi64(y[i], y[i + 2]);
    x[i + 1] = _mm512_unpackhi_epi64(y[i], y[i + 2]);
    x[i + 2] = _mm512_unpacklo_epi64(y[i + 1], y[i + 3]);
    x[i + 3] = _mm512_unpackhi_epi64(y[i + 1], y[i + 3]);
  }
#pragma GCC unroll 4
  for (int i = 0; i < 4; ++i) {
    y[i] = _mm512_shuffle_i32x4(x[i], x[i + 4], 0x88);
    y[i + 4] = _mm512_shuffle_i32x4(x[i], x[i + 4], 0xdd);
    y[i + 8] = _mm512_shuffle_i32x4(x[i + 8], x[i + 12], 0x88);
    y[i + 12] = _mm512_shuffle_i32x4(x[i + 8], x[i + 12], 0xdd);
  }
#pragma GCC unroll 4
  for (int i = 0; i < 4; ++i) {
    x[i] = _mm512_shuffle_i32x4(y[i], y[i + 8], 0x88);
    x[i + 8] = _mm512_shuffle_i32x4(y[i], y[i + 8], 0xdd);
    x[i + 4] = _mm512_shuffle_i32x4(y[i + 4], y[i + 12], 0x88);
    x[i + 12] = _mm512_shuffle_i32x4(y[i + 4], y[i + 12], 0xdd);
  }
}
inline uint32_t reduce_max_unsigned(IVec a) { return _mm512_reduce_max_epu32(a); }
inline float reduce_add(Vec a) { return _mm512_reduce_add_ps(a); }

// vpdpbusd multiplies unsigned by signed bytes. A signed left operand is stored with 128 added; the
// accumulator then starts at -128 times the column sums (Kernels::flip).
using Quads = IVec;
inline Quads load_quads(const void* p) { return _mm512_loadu_si512(p); }
inline IVec broadcast_quad(const void* a) {
  int32_t w;
  std::memcpy(&w, a, 4);
  return _mm512_set1_epi32(w);
}
// Written out because gcc 12 copies the accumulator around the intrinsic, twice per instruction.
inline IVec dot_us(IVec acc, IVec a, Quads b) {
  asm("vpdpbusd %2, %1, %0" : "+v"(acc) : "v"(a), "v"(b));
  return acc;
}
inline IVec dot_su(IVec acc, IVec a, Quads b) { return dot_us(acc, b, a); }
inline IVec dot_ss(IVec acc, IVec a, Quads b) { return dot_us(acc, a, b); }
/// Two products of BF16 values per element (AVX512-BF16). Written out for the same reason, and so
/// that the compiler cannot use the extension elsewhere.
inline Vec dot_pairs(Vec acc, IVec a, Quads b) {
  asm("vdpbf16ps %2, %1, %0" : "+v"(acc) : "v"(a), "v"(b));
  return acc;
}

}  // namespace sagebwd::cpu::isa::avx512
