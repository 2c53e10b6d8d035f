// SPDX-License-Identifier: Apache-2.0
// Register-blocked products over panels of 16 columns. Included once per instruction set, inside
// its namespace, after its vec_*.h and the constants kRows (rows per register block) and kPanels
// (panels per register block).

enum class Signs { us, su, ss };

/// `kRows` rows of a left operand, read as they are stored.
template <Signs kSigns>
struct StoredRows {
  const int8_t* at;
  int64_t stride;
  StoredRows(const Int8Product& p, int row)
      : at(static_cast<const int8_t*>(p.left) + row * p.left_stride), stride(p.left_stride) {}
  IVec start(int, IVec column) const { return column; }
  auto quad(int r, int k) const { return broadcast_quad(at + r * stride + k); }
  static IVec step(IVec acc, decltype(broadcast_quad(nullptr)) a, Quads b) {
    if constexpr (kSigns == Signs::us) return dot_us(acc, a, b);
    if constexpr (kSigns == Signs::su) return dot_su(acc, a, b);
#ifndef SAGE_SPLIT_ROWS
    if constexpr (kSigns == Signs::ss) return dot_ss(acc, a, b);
#endif
  }
};

/// One register block: `kRows` rows by N panels. epilogue.at(row, column) is where a row of the
/// block goes; its take(n, sums) gets the sums that lie n columns further. Products and epilogues
/// are passed by value: then the compiler knows that no store changes them.
template <int N, typename Rows, typename Epilogue>
SAGE_INLINE void int8_block(const Int8Product& p, const Rows& left, int row, int panel,
                            const Epilogue& epilogue) {
  const int64_t panel_bytes = static_cast<int64_t>(p.k) * kPanel;
  const auto* right = static_cast<const int8_t*>(p.right) + panel * panel_bytes;
  IVec acc[kRows][N];
#pragma GCC unroll 8
  for (int n = 0; n < N; ++n) {
    const IVec start = p.start != nullptr ? load(p.start + (panel + n) * kPanel) : set1(0);
#pragma GCC unroll 8
    for (int r = 0; r < kRows; ++r) acc[r][n] = left.start(r, start);
  }
  for (int k = 0; k < p.k; k += 4) {
    Quads b[N];
#pragma GCC unroll 8
    for (int n = 0; n < N; ++n) b[n] = load_quads(right + n * panel_bytes + k * kPanel);
#pragma GCC unroll 8
    for (int r = 0; r < kRows; ++r) {
      const auto a = left.quad(r, k);
#pragma GCC unroll 8
      for (int n = 0; n < N; ++n) acc[r][n] = Rows::step(acc[r][n], a, b[n]);
    }
  }
#pragma GCC unroll 8
  for (int r = 0; r < kRows; ++r) {
    const auto out = epilogue.at(row + r, panel * kPanel);
#pragma GCC unroll 8
    for (int n = 0; n < N; ++n) out.take(n * kPanel, acc[r][n]);
  }
}

template <Signs kSigns, int N, typename Epilogue>
inline void int8_rows(Int8Product p, int panel, Epilogue epilogue) {
  for (int row = 0; row < p.m; row += kRows)
    int8_block<N>(p, StoredRows<kSigns>(p, row), row, panel, epilogue);
}

template <Signs kSigns, typename Epilogue>
inline void stored_product(Int8Product p, Epilogue epilogue) {
  const int panels = p.n / kPanel;
  int panel = 0;
  for (; panel + kPanels <= panels; panel += kPanels)
    int8_rows<kSigns, kPanels>(p, panel, epilogue);
  if constexpr (kPanels > 2) {
    if (panel + 2 <= panels) {
      int8_rows<kSigns, 2>(p, panel, epilogue);
      panel += 2;
    }
  }
  if constexpr (kPanels > 1) {
    if (panel < panels) int8_rows<kSigns, 1>(p, panel, epilogue);
  }
}

template <Signs kSigns, typename Epilogue>
inline void int8_product(Int8Product p, Epilogue epilogue) {
#ifdef SAGE_SPLIT_ROWS
  if constexpr (kSigns == Signs::ss) {
    // Rows outside, so that each is split once.
    for (int row = 0; row < p.m; row += kRows) {
      const SplitRows left(p, row);
      for (int panel = 0; panel < p.n / kPanel; ++panel)
        int8_block<1>(p, left, row, panel, epilogue);
    }
  } else
#endif
  {
    stored_product<kSigns>(p, epilogue);
  }
}

template <int R, int N, typename Epilogue>
SAGE_INLINE void float_block(const FloatProduct& p, int row, int panel, const Epilogue& epilogue) {
  const float* left = p.left + row * p.left_stride;
  const float* right = p.right + panel * kPanel;
  Vec acc[R][N];
#pragma GCC unroll 8
  for (int r = 0; r < R; ++r)
#pragma GCC unroll 8
    for (int n = 0; n < N; ++n) acc[r][n] = set1(0.0f);
  for (int k = 0; k < p.k; ++k) {
    Vec b[N];
#pragma GCC unroll 8
    for (int n = 0; n < N; ++n) b[n] = load(right + k * p.right_stride + n * kPanel);
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r) {
      const Vec a = set1(left[r * p.left_stride + k]);
#pragma GCC unroll 8
      for (int n = 0; n < N; ++n) acc[r][n] = fma(a, b[n], acc[r][n]);
    }
  }
#pragma GCC unroll 8
  for (int r = 0; r < R; ++r) {
    const auto out = epilogue.at(row + r, panel * kPanel);
#pragma GCC unroll 8
    for (int n = 0; n < N; ++n) out.take(n * kPanel, acc[r][n]);
  }
}

template <int N, typename Epilogue>
inline void float_rows(FloatProduct p, int panel, Epilogue epilogue) {
  int row = 0;
  for (; row + kFloatRows <= p.m; row += kFloatRows)
    float_block<kFloatRows, N>(p, row, panel, epilogue);
  for (; row < p.m; row += 2) float_block<2, N>(p, row, panel, epilogue);
}

template <typename Epilogue>
inline void float_product(FloatProduct p, Epilogue epilogue) {
  const int panels = p.n / kPanel;
  int panel = 0;
  for (; panel + kPanels <= panels; panel += kPanels) float_rows<kPanels>(p, panel, epilogue);
  for (; panel < panels; ++panel) float_rows<1>(p, panel, epilogue);
}

// What happens to the sums of a product.

struct Stored {  // c = sums
  void* c;       // int32_t or float, as the sums are
  int64_t ldc;
  struct Row {
    void* c;
    void take(int n, IVec sums) const { store(static_cast<int32_t*>(c) + n, sums); }
    void take(int n, Vec sums) const { store(static_cast<float*>(c) + n, sums); }
  };
  Row at(int i, int j) const { return {static_cast<char*>(c) + 4 * (i * ldc + j)}; }
};

struct Added {  // c += sums
  float* c;
  int64_t ldc;
  struct Row {
    float* c;
    void take(int n, Vec sums) const { store(c + n, add(load(c + n), sums)); }
  };
  Row at(int i, int j) const { return {c + i * ldc + j}; }
};

struct RowScaled {  // c += sums · row[i]
  const float* row;
  float* c;
  int64_t ldc;
  struct Row {
    Vec scale;
    float* c;
    void take(int n, IVec sums) const { store(c + n, fma(to_float(sums), scale, load(c + n))); }
  };
  Row at(int i, int j) const { return {set1(row[i]), c + i * ldc + j}; }
};

struct ColumnScaled {  // c += sums · column[j]
  const float* column;
  float* c;
  int64_t ldc;
  struct Row {
    const float* column;
    float* c;
    void take(int n, IVec sums) const {
      store(c + n, fma(to_float(sums), load(column + n), load(c + n)));
    }
  };
  Row at(int i, int j) const { return {column + j, c + i * ldc + j}; }
};

struct Blended {  // c = c · alpha[j] + sums · beta[j]
  const float *alpha, *beta;
  float* c;
  int64_t ldc;
  struct Row {
    const float *alpha, *beta;
    float* c;
    void take(int n, IVec sums) const { take(n, to_float(sums)); }
    void take(int n, Vec sums) const {
      store(c + n, fma(sums, load(beta + n), mul(load(c + n), load(alpha + n))));
    }
  };
  Row at(int i, int j) const { return {alpha + j, beta + j, c + i * ldc + j}; }
};

inline void store_ss(const Int8Product& p, int32_t* c, int64_t ldc) {
  int8_product<Signs::ss>(p, Stored{c, ldc});
}
inline void row_us(const Int8Product& p, const float* row, float* c, int64_t ldc) {
  int8_product<Signs::us>(p, RowScaled{row, c, ldc});
}
inline void row_ss(const Int8Product& p, const float* row, float* c, int64_t ldc) {
  int8_product<Signs::ss>(p, RowScaled{row, c, ldc});
}
inline void column_ss(const Int8Product& p, const float* column, float* c, int64_t ldc) {
  int8_product<Signs::ss>(p, ColumnScaled{column, c, ldc});
}
inline void blend_su(const Int8Product& p, const float* alpha, const float* beta, float* c,
                     int64_t ldc) {
  int8_product<Signs::su>(p, Blended{alpha, beta, c, ldc});
}
inline void store_f32(const FloatProduct& p, float* c, int64_t ldc) {
  float_product(p, Stored{c, ldc});
}
inline void add_f32(const FloatProduct& p, float* c, int64_t ldc) {
  float_product(p, Added{c, ldc});
}
inline void blend_f32(const FloatProduct& p, const float* alpha, const float* beta, float* c,
                      int64_t ldc) {
  float_product(p, Blended{alpha, beta, c, ldc});
}
