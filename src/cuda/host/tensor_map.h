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

}  // namespace sagebwd::cuda
