// SPDX-License-Identifier: Apache-2.0
// Preparation of inputs: conversion, means, codes and operand layouts. All of it is linear in the
// number of tokens. Included once per instruction set, inside its namespace, after its vec_*.h.

template <typename T>
inline void load_rows_of(const void* src, int64_t stride, int rows, int d, float* dst, int ld) {
  for (int r = 0; r < rows; ++r) {
    const T* x = static_cast<const T*>(src) + r * stride;
    float* y = dst + static_cast<int64_t>(r) * ld;
    for (int c = 0; c < d; ++c) y[c] = ::sagebwd::to_float(x[c]);
    for (int c = d; c < ld; ++c) y[c] = 0.0f;
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

inline void row_magnitudes(const float* x, int ld, int rows, float* amax) {
  for (int r = 0; r < rows; ++r)
    amax[r] = std::bit_cast<float>(row_magnitude(x + static_cast<int64_t>(r) * ld, ld));
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

inline void pack_along_rows(const int8_t* codes, int64_t ldc, int rows, int cols, void* dst) {
  auto* out = static_cast<int8_t*>(dst);
  for (int panel = 0; panel < rows; panel += kPanel)
    for (int k = 0; k < cols; k += 4)
      for (int column = 0; column < kPanel; ++column, out += 4)
        std::memcpy(out, codes + (panel + column) * ldc + k, 4);
}

inline void pack_along_columns(const int8_t* codes, int64_t ldc, int rows, int cols, void* dst) {
  auto* out = static_cast<int8_t*>(dst);
  for (int panel = 0; panel < cols; panel += kPanel)
    for (int k = 0; k < rows; k += 4, out += 4 * kPanel)
      for (int column = 0; column < kPanel; ++column)
        for (int r = 0; r < 4; ++r) out[4 * column + r] = codes[(k + r) * ldc + panel + column];
}

inline void transpose_codes(const int8_t* codes, int64_t ldc, int rows, int cols, uint8_t flip,
                            int8_t* dst, int64_t ldd) {
  // In blocks of 16 rows, so that both sides stay within a few cache lines.
  for (int r0 = 0; r0 < rows; r0 += 16)
    for (int c = 0; c < cols; ++c)
      for (int r = r0; r < r0 + 16; ++r)
        dst[c * ldd + r] = static_cast<int8_t>(codes[r * ldc + c] ^ flip);
}

inline void transpose_f32(const float* x, int64_t ld, int rows, int cols, float* dst, int64_t ldd) {
  for (int r0 = 0; r0 < rows; r0 += 16)
    for (int c = 0; c < cols; ++c)
      for (int r = r0; r < r0 + 16; ++r) dst[c * ldd + r] = x[r * ld + c];
}
