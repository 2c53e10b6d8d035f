// SPDX-License-Identifier: Apache-2.0
// Sixteen elements in plain C++. The portable member of the vec_* family: the same names mean the
// same thing in each, and the tile code is written once on top of them.
#pragma once

#include <bit>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <utility>

#include "base/half.h"

namespace sagebwd::cpu::isa::scalar {

struct Vec {
  float v[16];
};
struct IVec {
  int32_t v[16];
};
struct Mask {  // one flag per element
  bool v[16];
};

#define SAGE_LANES for (int i = 0; i < 16; ++i)

inline Vec load(const float* p) {
  Vec r;
  std::memcpy(r.v, p, sizeof(r));
  return r;
}
inline IVec load(const int32_t* p) {
  IVec r;
  std::memcpy(r.v, p, sizeof(r));
  return r;
}
template <typename T>  // bf16 or f16
inline Vec load(const T* p) {
  Vec r;
  SAGE_LANES r.v[i] = ::sagebwd::to_float(p[i]);
  return r;
}
/// Sixteen bytes, widened.
inline IVec load_codes(const int8_t* p) {
  IVec r;
  SAGE_LANES r.v[i] = p[i];
  return r;
}
inline void store(float* p, Vec x) { std::memcpy(p, x.v, sizeof(x)); }
inline void store(int32_t* p, IVec x) { std::memcpy(p, x.v, sizeof(x)); }
inline Vec set1(float x) {
  Vec r;
  SAGE_LANES r.v[i] = x;
  return r;
}
inline IVec set1(int32_t x) {
  IVec r;
  SAGE_LANES r.v[i] = x;
  return r;
}
inline Vec add(Vec a, Vec b) {
  SAGE_LANES a.v[i] += b.v[i];
  return a;
}
inline Vec sub(Vec a, Vec b) {
  SAGE_LANES a.v[i] -= b.v[i];
  return a;
}
inline Vec mul(Vec a, Vec b) {
  SAGE_LANES a.v[i] *= b.v[i];
  return a;
}
inline Vec div(Vec a, Vec b) {
  SAGE_LANES a.v[i] /= b.v[i];
  return a;
}
/// a·b + c; fused where the instruction set has it.
inline Vec fma(Vec a, Vec b, Vec c) {
  SAGE_LANES c.v[i] = a.v[i] * b.v[i] + c.v[i];
  return c;
}
/// The second operand where either is NaN: max(bound, x) keeps a NaN in x.
inline Vec max(Vec a, Vec b) {
  SAGE_LANES b.v[i] = a.v[i] > b.v[i] ? a.v[i] : b.v[i];
  return b;
}
inline Vec min(Vec a, Vec b) {
  SAGE_LANES b.v[i] = a.v[i] < b.v[i] ? a.v[i] : b.v[i];
  return b;
}
inline Vec floor(Vec a) {
  SAGE_LANES a.v[i] = std::floor(a.v[i]);
  return a;
}
inline IVec add(IVec a, IVec b) {
  SAGE_LANES a.v[i] += b.v[i];
  return a;
}
/// Maximum of the bit patterns of magnitudes. Unlike a float maximum it keeps NaN: it is the
/// largest pattern.
inline IVec max_unsigned(IVec a, IVec b) {
  SAGE_LANES a.v[i] =
      static_cast<uint32_t>(a.v[i]) > static_cast<uint32_t>(b.v[i]) ? a.v[i] : b.v[i];
  return a;
}
inline IVec magnitude_bits(Vec a) {
  IVec r;
  SAGE_LANES r.v[i] = std::bit_cast<int32_t>(a.v[i]) & 0x7fffffff;
  return r;
}
inline IVec as_int(Vec a) { return std::bit_cast<IVec>(a); }
inline Vec as_float(IVec a) { return std::bit_cast<Vec>(a); }
inline Vec to_float(IVec a) {
  Vec r;
  SAGE_LANES r.v[i] = static_cast<float>(a.v[i]);
  return r;
}
/// Nearest integer, ties to even. Out of range or NaN gives some integer whose low byte is 0.
inline IVec round_to_int(Vec a) {
  IVec r;
  SAGE_LANES r.v[i] =
      std::fabs(a.v[i]) < 0x1p22f ? static_cast<int32_t>(std::nearbyint(a.v[i])) : 0;
  return r;
}
inline IVec shift_left_23(IVec a) {
  SAGE_LANES a.v[i] = static_cast<int32_t>(static_cast<uint32_t>(a.v[i]) << 23);
  return a;
}
/// Elements with lo <= x < hi.
inline Mask in_range(IVec lo, IVec hi, int32_t x) {
  Mask r;
  SAGE_LANES r.v[i] = lo.v[i] <= x && x < hi.v[i];
  return r;
}
inline Mask greater(Vec a, Vec b) {  // false for NaN
  Mask r;
  SAGE_LANES r.v[i] = a.v[i] > b.v[i];
  return r;
}
inline Vec select(Mask m, Vec a, Vec b) {
  SAGE_LANES b.v[i] = m.v[i] ? a.v[i] : b.v[i];
  return b;
}
/// Negates the elements whose bit of `flipped` is set.
inline Vec flip_signs(Vec a, uint16_t flipped) {
  SAGE_LANES a.v[i] = (flipped >> i & 1) != 0 ? -a.v[i] : a.v[i];
  return a;
}
/// Of elements i and i + kStep (bit kStep of i clear) the sum and the difference, in their places.
template <int kStep>
inline Vec butterfly(Vec a) {
  Vec r;
  SAGE_LANES r.v[i] = (i & kStep) == 0 ? a.v[i] + a.v[i + kStep] : a.v[i - kStep] - a.v[i];
  return r;
}
/// The low bytes of the elements, in order.
inline void store_bytes(void* p, IVec x) {
  SAGE_LANES static_cast<int8_t*>(p)[i] = static_cast<int8_t>(x.v[i]);
}
/// The codes of four vectors in order, each byte XORed with `flip`; codes must be within [-128,
/// 127].
inline void store_codes(void* p, const IVec (&x)[4], uint8_t flip) {
  for (int v = 0; v < 4; ++v)
    SAGE_LANES static_cast<uint8_t*>(p)[16 * v + i] = static_cast<uint8_t>(x[v].v[i]) ^ flip;
}
/// The same for codes within [0, 255].
inline void store_unsigned(void* p, const IVec (&x)[4]) { store_codes(p, x, 0); }
/// Element i gets the low bytes of its four values, first one lowest: 64 bytes [16 elements][4].
inline void store_quads(void* p, IVec a, IVec b, IVec c, IVec d) {
  SAGE_LANES {
    const uint32_t w =
        static_cast<uint32_t>(a.v[i] & 255) | static_cast<uint32_t>(b.v[i] & 255) << 8 |
        static_cast<uint32_t>(c.v[i] & 255) << 16 | static_cast<uint32_t>(d.v[i] & 255) << 24;
    std::memcpy(static_cast<char*>(p) + 4 * i, &w, 4);
  }
}
/// 16×16 elements.
inline void transpose(IVec (&x)[16]) {
  for (int r = 0; r < 16; ++r)
    for (int i = 0; i < r; ++i) std::swap(x[r].v[i], x[i].v[r]);
}
inline uint32_t reduce_max_unsigned(IVec a) {
  uint32_t r = 0;
  SAGE_LANES r = static_cast<uint32_t>(a.v[i]) > r ? static_cast<uint32_t>(a.v[i]) : r;
  return r;
}
inline float reduce_add(Vec a) {
  float r[8];
  for (int i = 0; i < 8; ++i) r[i] = a.v[i] + a.v[i + 8];
  for (int i = 0; i < 4; ++i) r[i] += r[i + 4];
  return (r[0] + r[2]) + (r[1] + r[3]);
}

// Dot products of four bytes per element with four broadcast bytes of the left operand.
using Quads = IVec;  // 64 bytes [16 elements][4]
inline Quads load_quads(const void* p) { return load(static_cast<const int32_t*>(p)); }
inline IVec broadcast_quad(const void* a) {
  int32_t w;
  std::memcpy(&w, a, 4);
  return set1(w);
}
template <typename TA, typename TB>
inline IVec dot_bytes(IVec acc, IVec a, IVec b) {
  SAGE_LANES {
    TA x[4];
    TB y[4];
    std::memcpy(x, &a.v[i], 4);
    std::memcpy(y, &b.v[i], 4);
    acc.v[i] += x[0] * y[0] + x[1] * y[1] + x[2] * y[2] + x[3] * y[3];
  }
  return acc;
}
inline IVec dot_us(IVec acc, IVec a, Quads b) { return dot_bytes<uint8_t, int8_t>(acc, a, b); }
inline IVec dot_su(IVec acc, IVec a, Quads b) { return dot_bytes<int8_t, uint8_t>(acc, a, b); }
inline IVec dot_ss(IVec acc, IVec a, Quads b) { return dot_bytes<int8_t, int8_t>(acc, a, b); }

#undef SAGE_LANES

}  // namespace sagebwd::cpu::isa::scalar
