// SPDX-License-Identifier: Apache-2.0
// What the linear branch asks for besides products: its feature map, the way back through it, and
// sums in FP64. Included once per instruction set, inside its namespace, after tile.inl.

inline void softmax_rows(float* x, int ld, int rows, int d) {
  for (int r = 0; r < rows; ++r) {
    float* row = x + static_cast<int64_t>(r) * ld;
    for (int c = d; c < ld; ++c) row[c] = -std::numeric_limits<float>::infinity();
    Vec tops = load(row);
    for (int c = kPanel; c < ld; c += kPanel) tops = max(tops, load(row + c));
    float values[kPanel];
    store(values, tops);
    float top = values[0];
    for (float value : values) top = value > top ? value : top;
    Vec sum = set1(0.0f);
    for (int c = 0; c < ld; c += kPanel) {
      const Vec y = exp2_nonpositive(mul(sub(load(row + c), set1(top)), set1(numerics::kLog2e)));
      sum = add(sum, y);
      store(row + c, y);
    }
    const Vec inverse = set1(1.0f / reduce_add(sum));
    for (int c = 0; c < ld; c += kPanel) store(row + c, mul(load(row + c), inverse));
  }
}

inline void softmax_rows_back(const float* phi, float* dphi, int ld, int rows) {
  for (int r = 0; r < rows; ++r) {
    const float* p = phi + static_cast<int64_t>(r) * ld;
    float* g = dphi + static_cast<int64_t>(r) * ld;
    Vec sum = set1(0.0f);
    for (int c = 0; c < ld; c += kPanel) sum = fma(load(p + c), load(g + c), sum);
    const Vec mean = set1(reduce_add(sum));
    for (int c = 0; c < ld; c += kPanel) store(g + c, mul(load(p + c), sub(load(g + c), mean)));
  }
}

inline void add_in_f64(const float* x, int64_t n, double* sum) {
  for (int64_t i = 0; i < n; ++i) sum[i] += static_cast<double>(x[i]);
}

inline void add_magnitudes_in_f64(const float* x, int64_t n, double* sum) {
  for (int64_t i = 0; i < n; ++i) sum[i] += static_cast<double>(std::fabs(x[i]));
}

inline void subtract_in_f64(const float* x, int64_t n, double* sum) {
  for (int64_t i = 0; i < n; ++i) sum[i] -= static_cast<double>(x[i]);
}
