// SPDX-License-Identifier: Apache-2.0
// Descriptions of matrices for the copies of Hopper (arch/mbarrier.cuh).
#pragma once

#include <cuda.h>

#include <cstdint>

#include "cuda/tile/views.h"

namespace sagebwd::cuda {

/// A matrix of bytes with `rows` rows of `row_bytes` (64 or 128) bytes behind one another. A copy
/// takes `box_rows` rows and swizzles them over row_bytes. Rows outside are zeros.
CUtensorMap byte_matrix(const void* data, int64_t rows, int row_bytes, int box_rows);

/// A matrix of 16-bit numbers with rows of `columns` (64 or 128) behind one another. A copy takes
/// `box_rows` rows in panels of 64 columns, swizzled over 128 bytes.
CUtensorMap panel_matrix(const void* data, int64_t rows, int columns, int box_rows);

/// Tokens of one of the caller's tensors, [b, h, n, d] of 16-bit numbers with d 64 or 128. A copy
/// takes `box_tokens` tokens of a head in panels of 64 channels, swizzled over 128 bytes. Heads of
/// an expanded tensor, whose stride is zero, count as one, and so do batches: a copy asks for the
/// first. Returns false where no map can describe the tensor: rows that are not aligned, or strides
/// that are negative or too large.
bool token_map(CUtensorMap& map, const Strided& x, int64_t b, int64_t h, int64_t n, int d,
               int box_tokens);

}  // namespace sagebwd::cuda
