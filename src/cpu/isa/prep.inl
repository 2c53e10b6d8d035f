// SPDX-License-Identifier: Apache-2.0
// Preparation of inputs: conversion, means, codes and operand layouts. All of it is linear in the
// number of tokens. Included once per instruction set, inside its namespace, after its vec_*.h.

template <typename T>
inline void load_rows_of(const void* src, int64_t stride, int rows, int d, float* dst, int ld) {
  for (int r = 0; r < rows; ++r) {
    const T* x = static_cast<const T*>(src) + r * stride;
    float* y = dst + static_cast<int64_t>(r) * ld;
    int c = 0;
    for (; c + kPanel <= d; c += kPanel) store(y + c, load(x + c));
    for (; c < d; ++c) y[c] = ::sagebwd::to_float(x[c]);
    for (; c < ld; ++c) y[c] = 0.0f;
  }
}

inline void load_rows(Dtype dtype, const void* src, int64_t stride, int rows, int d, float* dst,
                      int ld) {
  with_dtype(dtype, [&](auto t) { load_rows_of<decltype(t)>(src, stride, rows, d, dst, ld); });
}

inline void store_rows(Dtype dtype, void* dst, int64_t stride, int rows, int d, const float* src,
                       int ld, float factor) {
  with_dtype(dtype, [&](auto t) {
    using T = decltype(t);
    for (int r = 0; r < rows; ++r) {
      const float* x = src + static_cast<int64_t>(r) * ld;
      T* y = static_cast<T*>(dst) + r * stride;
      for (int c = 0; c < d; ++c) y[c] = from_float<T>(x[c] * factor);
    }
  });
}

/// Largest magnitude of a row as bits; at or above 0x7f800000 when something is not finite.
inline uint32_t row_magnitude(const float* x, int ld) {
  IVec m = set1(0);
  for (int c = 0; c < ld; c += kPanel) m = max_unsigned(m, magnitude_bits(load(x + c)));
  return reduce_max_unsigned(m);
}

inline int sum_rows(const float* x, int ld, int rows, int d, double* sum) {
  int count = 0;
  for (int r = 0; r < rows; ++r) {
    const float* row = x + static_cast<int64_t>(r) * ld;
    if (row_magnitude(row, ld) >= 0x7f800000u) continue;
    ++count;
    for (int c = 0; c < d; ++c) sum[c] += static_cast<double>(row[c]);
  }
  return count;
}

inline void subtract_row(float* x, int ld, int rows, const float* row) {
  for (int r = 0; r < rows; ++r)
    for (int c = 0; c < ld; c += kPanel) {
      float* at = x + static_cast<int64_t>(r) * ld + c;
      store(at, sub(load(at), load(row + c)));
    }
}

inline void row_dots(const float* x, int ld, int rows, const float* y, int64_t ldy, double* dots) {
  for (int r = 0; r < rows; ++r) {
    const float* a = x + static_cast<int64_t>(r) * ld;
    const float* b = y + r * ldy;
    double sum[kPanel] = {};  // apart, so that they need not wait for one another
    for (int c = 0; c < ld; c += kPanel)
#pragma GCC unroll 16
      for (int i = 0; i < kPanel; ++i)
        sum[i] += static_cast<double>(a[c + i]) * static_cast<double>(b[c + i]);
    for (int half = kPanel / 2; half > 0; half /= 2)
      for (int i = 0; i < half; ++i) sum[i] += sum[i + half];
    dots[r] = sum[0];
  }
}

inline void add_values(const float* x, int64_t n, float* sum) {
  for (int64_t i = 0; i < n; i += kPanel) store(sum + i, add(load(sum + i), load(x + i)));
}

inline void row_magnitudes(const float* x, int ld, int rows, float* amax) {
  for (int r = 0; r < rows; ++r)
    amax[r] = std::bit_cast<float>(row_magnitude(x + static_cast<int64_t>(r) * ld, ld));
}

/// x ← x·H/√n for `kVectors` vectors: one run of n channels, or two of 8 in a single vector.
template <int kVectors>
inline void hadamard(Vec (&x)[kVectors], int n) {
#pragma GCC unroll 16
  for (int i = 0; i < kVectors; ++i) {
    x[i] = butterfly<4>(butterfly<2>(butterfly<1>(x[i])));
    if (n > 8) x[i] = butterfly<8>(x[i]);
  }
#pragma GCC unroll 4
  for (int h = 1; h < kVectors; h *= 2)
#pragma GCC unroll 16
    for (int i = 0; i < kVectors; ++i)
      if ((i & h) == 0) {
        const Vec a = x[i], b = x[i + h];
        x[i] = add(a, b), x[i + h] = sub(a, b);
      }
  const Vec unit = set1(numerics::rotation_unit(n));
#pragma GCC unroll 16
  for (int i = 0; i < kVectors; ++i) x[i] = mul(x[i], unit);
}

enum class Turn { forth, back };

/// numerics::rotate or rotate_back of rows whose channels mix in runs of `kVectors` vectors.
template <int kVectors, Turn kTurn>
inline void turn_rows_of(float* x, int ld, int rows, int d) {
  uint16_t flipped[numerics::kMostRotated / kPanel];
  for (int c = 0; c < d; c += kPanel)
    flipped[c / kPanel] = static_cast<uint16_t>(numerics::rotation_signs(c / 32) >> c % 32);
  const int n = numerics::rotation_block(d);
  for (int r = 0; r < rows; ++r)
    for (int c = 0; c < d; c += kVectors * kPanel) {
      float* at = x + static_cast<int64_t>(r) * ld + c;
      const uint16_t* signs = flipped + c / kPanel;
      Vec v[kVectors];
#pragma GCC unroll 16
      for (int i = 0; i < kVectors; ++i) {
        v[i] = load(at + i * kPanel);
        if constexpr (kTurn == Turn::forth) v[i] = flip_signs(v[i], signs[i]);
      }
      hadamard(v, n);
#pragma GCC unroll 16
      for (int i = 0; i < kVectors; ++i) {
        if constexpr (kTurn == Turn::back) v[i] = flip_signs(v[i], signs[i]);
        store(at + i * kPanel, v[i]);
      }
    }
}

template <Turn kTurn>
inline void turn_rows(float* x, int ld, int rows, int d) {
  switch (numerics::rotation_block(d) / kPanel) {
    case 16:
      return turn_rows_of<16, kTurn>(x, ld, rows, d);
    case 8:
      return turn_rows_of<8, kTurn>(x, ld, rows, d);
    case 4:
      return turn_rows_of<4, kTurn>(x, ld, rows, d);
    case 2:
      return turn_rows_of<2, kTurn>(x, ld, rows, d);
    default:
      return turn_rows_of<1, kTurn>(x, ld, rows, d);
  }
}

inline void rotate_rows(float* x, int ld, int rows, int d) {
  turn_rows<Turn::forth>(x, ld, rows, d);
}
inline void rotate_rows_back(float* x, int ld, int rows, int d) {
  turn_rows<Turn::back>(x, ld, rows, d);
}

inline void encode_rows(const float* x, int ld, int rows, const float* scale, int8_t* codes,
                        int64_t ldc) {
  for (int r = 0; r < rows; ++r) {
    int8_t* out = codes + r * ldc;
    if (!(scale[r] == scale[r])) {  // a row that is not finite
      std::memset(out, 0, static_cast<size_t>(ld));
      continue;
    }
    const Vec inverse = set1(numerics::inverse_of(scale[r]));
    const float* row = x + static_cast<int64_t>(r) * ld;
    for (int c = 0; c < ld; c += kPanel)
      store_bytes(out + c, round_to_int(mul(load(row + c), inverse)));
  }
}

inline void decode_rows(const int8_t* codes, int64_t ldc, int rows, int ld, float* x) {
  for (int r = 0; r < rows; ++r)
    for (int c = 0; c < ld; c += kPanel)
      store(x + static_cast<int64_t>(r) * ld + c, to_float(load_codes(codes + r * ldc + c)));
}

inline void sum_row_codes(const int8_t* codes, int64_t ldc, int rows, int cols, int32_t* sum) {
  for (int r = 0; r < rows; ++r) {
    int32_t s = 0;
    for (int c = 0; c < cols; ++c) s += codes[r * ldc + c];
    sum[r] = s;
  }
}

inline void sum_column_codes(const int8_t* codes, int64_t ldc, int rows, int cols, int32_t* sum) {
  for (int c = 0; c < cols; c += kPanel) {
    IVec s = set1(0);
    for (int r = 0; r < rows; ++r) s = add(s, load_codes(codes + r * ldc + c));
    store(sum + c, s);
  }
}

/// 16×16 elements of 32 bits; rows lie `from_stride` and `to_stride` bytes apart.
inline void transpose_square(const void* from, int64_t from_stride, void* to, int64_t to_stride) {
  IVec x[kPanel];
#pragma GCC unroll 16
  for (int r = 0; r < kPanel; ++r)
    x[r] = load(reinterpret_cast<const int32_t*>(static_cast<const char*>(from) + r * from_stride));
  transpose(x);
#pragma GCC unroll 16
  for (int r = 0; r < kPanel; ++r)
    store(reinterpret_cast<int32_t*>(static_cast<char*>(to) + r * to_stride), x[r]);
}

inline void pack_along_rows(const int8_t* codes, int64_t ldc, int rows, int cols, void* dst) {
  constexpr int kQuads = 4 * kPanel;  // bytes of a square's row
  auto* out = static_cast<int8_t*>(dst);
  for (int panel = 0; panel < rows; panel += kPanel, out += static_cast<int64_t>(cols) * kPanel) {
    const int8_t* in = codes + panel * ldc;
    int k = 0;
    for (; k + kQuads <= cols; k += kQuads) transpose_square(in + k, ldc, out + k * kPanel, kQuads);
    for (; k < cols; k += 4)
      for (int column = 0; column < kPanel; ++column)
        std::memcpy(out + k * kPanel + 4 * column, in + column * ldc + k, 4);
  }
}

inline void pack_along_columns(const int8_t* codes, int64_t ldc, int rows, int cols, void* dst) {
  auto* out = static_cast<int8_t*>(dst);
  for (int panel = 0; panel < cols; panel += kPanel)
    for (int k = 0; k < rows; k += 4, out += 4 * kPanel) {
      const int8_t* in = codes + k * ldc + panel;
      store_quads(out, load_codes(in), load_codes(in + ldc), load_codes(in + 2 * ldc),
                  load_codes(in + 3 * ldc));
    }
}

inline void transpose_codes(const int8_t* codes, int64_t ldc, int rows, int cols, int8_t* dst,
                            int64_t ldd) {
  constexpr int kQuads = 4 * kPanel;
  for (int r = 0; r < rows; r += kQuads)
    for (int c = 0; c < cols; c += kPanel) {
      alignas(64)
          int8_t quads[kPanel * kQuads];  // a square whose elements are four rows of a column
      pack_along_columns(codes + r * ldc + c, ldc, kQuads, kPanel, quads);
      transpose_square(quads, kQuads, dst + c * ldd + r, ldd);
    }
}

inline void transpose_f32(const float* x, int64_t ld, int rows, int cols, float* dst, int64_t ldd) {
  for (int r = 0; r < rows; r += kPanel)
    for (int c = 0; c < cols; c += kPanel)
      transpose_square(x + r * ld + c, 4 * ld, dst + c * ldd + r, 4 * ldd);
}
