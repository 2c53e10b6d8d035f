// SPDX-License-Identifier: Apache-2.0
// What the forward and the backward of the recipe oracle share: the geometry of a tile, its logits,
// one matmul, and the quantiser of P and dS.
#pragma once

#include <vector>

#include "numerics/quantize.h"
#include "ref/attention_recipe.h"
#include "ref/recipe_inputs.h"

namespace sagebwd::ref {

/// C[m, n] += A[m, k]·B[k, n]. B and C are row-major; A has any strides and may hold codes.
template <typename T>
void matmul_add(int64_t m, int64_t n, int64_t k, const T* a, int64_t a_row, int64_t a_col,
                const float* b, int64_t ldb, float* c, int64_t ldc) {
  const auto at = [&](int64_t i, int64_t t) {
    return static_cast<float>(a[i * a_row + t * a_col]);
  };
  for (int64_t i = 0; i < m; ++i) {
    float* to = c + i * ldc;
    int64_t t = 0;
    for (; t + 4 <= k; t += 4) {  // four terms at a time spare loads and stores of C
      const float a0 = at(i, t), a1 = at(i, t + 1), a2 = at(i, t + 2), a3 = at(i, t + 3);
      const float *b0 = b + t * ldb, *b1 = b0 + ldb, *b2 = b1 + ldb, *b3 = b2 + ldb;
      for (int64_t j = 0; j < n; ++j)
        to[j] += (a0 * b0[j] + a1 * b1[j]) + (a2 * b2[j] + a3 * b3[j]);
    }
    for (; t < k; ++t) {
      const float a0 = at(i, t);
      for (int64_t j = 0; j < n; ++j) to[j] += a0 * b[t * ldb + j];
    }
  }
}

/// The key tiles that a query tile visits, in the order of the visit. Loops over tiles ask this and
/// assume nothing about the order.
struct KeyWalk {
  KeyWalk(const RecipeHead& head, int64_t q_index);

  std::vector<int64_t> tiles;
  // How many, from the first on, keep P unquantised because the recipe says so.
  int64_t leading = 0;
};

/// Queries q0 … q0 + rows - 1 by keys k0 … k0 + cols - 1, and which of them each query sees.
struct Tile {
  int64_t q_index, k_index;
  int64_t q0, k0, rows, cols;
  std::vector<Span> seen;  // [rows]: columns of the tile

  bool empty() const;
  size_t size() const { return static_cast<size_t>(rows * cols); }
  /// f(row, column, row * cols + column) for every visible entry.
  template <typename F>
  void for_visible(F f) const {
    for (int64_t i = 0; i < rows; ++i)
      for (int64_t j = seen[i].begin; j < seen[i].end; ++j) f(i, j, i * cols + j);
  }
};

Tile make_tile(const RecipeHead& head, int64_t q_index, int64_t k_index);

/// The bias that Q-smoothing takes out of the logits of one query block, [nk]; empty when there is
/// none.
std::vector<float> logit_bias(const RecipeHead& head, const RecipeOperands& x, int64_t q_index,
                              bool lifted);

/// Logits of a tile in log2 units, [rows, cols]; -inf where masked. They lack what K-smoothing took
/// out of the row (RecipeInputs::mean_logit).
std::vector<float> tile_logits(const RecipeHead& head, const RecipeOperands& x, const Tile& tile,
                               const std::vector<float>& bias, bool lifted);

/// Caps the logits of a tile and gives them what K-smoothing took: softmax does not notice that,
/// but a cap does. Returns the derivatives, which multiply dS; ones without a cap.
std::vector<float> cap_logits(const RecipeHead& head, const RecipeInputs& in, const Tile& tile,
                              std::vector<float>& s2);

/// Which lines of a tile share a scale in `vectorwise`.
enum class Axis { query, key };

struct TileCodes {
  std::vector<int16_t> codes;  // [rows, cols]
  std::vector<float> scale;    // [rows] or [cols]
};

/// Quantises the values of a tile (0 where masked), with a scale per line along `axis`, or one per
/// tile in `paper`.
TileCodes quantize_tile(const RecipeHead& head, const Tile& tile, const std::vector<float>& values,
                        Axis axis, Matmul matmul, numerics::DitherOperand operand, float levels);

/// Rounds a value as the recipe asks for the codes of a matmul; one object per tile and operand.
class Rounder {
 public:
  Rounder(const RecipeHead& head, const Tile& tile, Matmul matmul, numerics::DitherOperand operand,
          float levels);
  int16_t operator()(float x, float inverse, int64_t row, int64_t col) const {
    if (key_term_.empty()) return static_cast<int16_t>(numerics::code_nearest(x, inverse));
    return static_cast<int16_t>(numerics::code_dither(
        x, inverse,
        numerics::dither_offset(numerics::dither_query_term(static_cast<int>(row)), key_term_[col]),
        levels_));
  }

 private:
  float levels_;
  std::vector<float> key_term_;  // empty: nearest
};

}  // namespace sagebwd::ref
