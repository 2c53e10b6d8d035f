// SPDX-License-Identifier: Apache-2.0
// The product of BF16 operands, blocked as those of gemm.inl are. Included after it, inside the
// namespace of an instruction set that has dot_pairs.

/// One register block: `kRows` rows by `kPanels` panels.
SAGE_INLINE void bf16_block(const Bf16Product& p, int row, int panel, float* c, int64_t ldc) {
  const int64_t panel_size = static_cast<int64_t>(p.k) * kPanel;
  const bf16* left = p.left + row * p.left_stride;
  const bf16* right = p.right + panel * panel_size;
  Vec acc[kRows][kPanels];
#pragma GCC unroll 8
  for (int r = 0; r < kRows; ++r)
#pragma GCC unroll 8
    for (int n = 0; n < kPanels; ++n) acc[r][n] = set1(0.0f);
  for (int k = 0; k < p.k; k += 2) {
    Quads b[kPanels];
#pragma GCC unroll 8
    for (int n = 0; n < kPanels; ++n) b[n] = load_quads(right + n * panel_size + k * kPanel);
#pragma GCC unroll 8
    for (int r = 0; r < kRows; ++r) {
      const auto a = broadcast_quad(left + r * p.left_stride + k);
#pragma GCC unroll 8
      for (int n = 0; n < kPanels; ++n) acc[r][n] = dot_pairs(acc[r][n], a, b[n]);
    }
  }
#pragma GCC unroll 8
  for (int r = 0; r < kRows; ++r)
#pragma GCC unroll 8
    for (int n = 0; n < kPanels; ++n) store(c + (row + r) * ldc + (panel + n) * kPanel, acc[r][n]);
}

inline void store_bf16(const Bf16Product& p, float* c, int64_t ldc) {
  for (int panel = 0; panel < p.n / kPanel; panel += kPanels)
    for (int row = 0; row < p.m; row += kRows) bf16_block(p, row, panel, c, ldc);
}
