// SPDX-License-Identifier: Apache-2.0
// Of the driver's interface what describes tensors (emulator/tensor_map.cpp).
#pragma once

#include <cstdint>

using cuuint32_t = uint32_t;
using cuuint64_t = uint64_t;

enum CUresult { CUDA_SUCCESS = 0, CUDA_ERROR_INVALID_VALUE = 1 };
enum CUtensorMapDataType { CU_TENSOR_MAP_DATA_TYPE_UINT8, CU_TENSOR_MAP_DATA_TYPE_UINT16 };
enum CUtensorMapInterleave { CU_TENSOR_MAP_INTERLEAVE_NONE };
enum CUtensorMapSwizzle { CU_TENSOR_MAP_SWIZZLE_64B = 2, CU_TENSOR_MAP_SWIZZLE_128B = 3 };
enum CUtensorMapL2promotion { CU_TENSOR_MAP_L2_PROMOTION_L2_256B };
enum CUtensorMapFloatOOBfill { CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE };

/// A tensor of up to five dimensions, the first one contiguous, and the box of it that a copy
/// takes.
struct alignas(64) CUtensorMap {
  const uint8_t* data;
  int element, dimensions;     // bytes of an element
  int64_t size[5], stride[5];  // in elements, and bytes
  int box[5];
  CUtensorMapSwizzle swizzle;
};
