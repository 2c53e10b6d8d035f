// SPDX-License-Identifier: Apache-2.0
// Descriptions of matrices for the copies of Hopper (arch/mbarrier.cuh).
#pragma once

#include <cuda.h>

#include <cstdint>

namespace sagebwd::cuda {

/// A matrix of bytes with `rows` rows of `row_bytes` (64 or 128) bytes behind one another. A copy
/// takes `box_rows` rows and swizzles them over row_bytes. Rows outside are zeros.
CUtensorMap byte_matrix(const void* data, int64_t rows, int row_bytes, int box_rows);

/// A matrix of 16-bit numbers with rows of `columns` (64 or 128) behind one another. A copy takes
/// `box_rows` rows in panels of 64 columns, swizzled over 128 bytes.
CUtensorMap panel_matrix(const void* data, int64_t rows, int columns, int box_rows);

/// 16-bit numbers [batches, heads, tokens, columns] with strides in elements, columns behind one
/// another. A copy takes `box_tokens` tokens of a head in such panels; tokens outside are zeros.
struct PanelTensor {
  const void* data;
  int64_t batches, heads, tokens;
  int64_t batch_stride, head_stride, token_stride;
  int columns;
};
inline constexpr int64_t kMostStride = int64_t{1} << 38;  // strides are below
CUtensorMap panel_tensor(const PanelTensor& x, int box_tokens);

}  // namespace sagebwd::cuda
