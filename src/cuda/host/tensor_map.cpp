// SPDX-License-Identifier: Apache-2.0
#include "cuda/host/tensor_map.h"

#include <cudaTypedefs.h>
#include <cuda_runtime_api.h>

#include "cuda/host/check.h"

namespace sagebwd::cuda {
namespace {

/// The driver's function, asked for by name: the library does not link to the driver, which many
/// machines that build or load it do not have.
PFN_cuTensorMapEncodeTiled_v12000 encoder() {
  static const auto found = [] {
    void* function = nullptr;
    cudaDriverEntryPointQueryResult result;
    SAGE_CUDA(cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &function, 12000,
                                               cudaEnableDefault, &result));
    if (result != cudaDriverEntryPointSuccess || function == nullptr)
      SAGE_THROW(ErrorKind::internal, "the CUDA driver has no cuTensorMapEncodeTiled");
    return reinterpret_cast<PFN_cuTensorMapEncodeTiled_v12000>(function);
  }();
  return found;
}

CUtensorMap matrix(CUtensorMapDataType type, const void* data, int64_t rows, int columns,
                   int element, int box_columns, int box_rows) {
  CUtensorMap map;
  const cuuint64_t sizes[2] = {static_cast<cuuint64_t>(columns), static_cast<cuuint64_t>(rows)};
  const cuuint64_t strides[1] = {static_cast<cuuint64_t>(columns * element)};
  const cuuint32_t box[2] = {static_cast<cuuint32_t>(box_columns),
                             static_cast<cuuint32_t>(box_rows)};
  const cuuint32_t steps[2] = {1, 1};
  const CUresult status =
      encoder()(&map, type, 2, const_cast<void*>(data), sizes, strides, box, steps,
                CU_TENSOR_MAP_INTERLEAVE_NONE,
                box_columns * element == 128 ? CU_TENSOR_MAP_SWIZZLE_128B
                                             : CU_TENSOR_MAP_SWIZZLE_64B,
                CU_TENSOR_MAP_L2_PROMOTION_L2_256B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  if (status != CUDA_SUCCESS)
    SAGE_THROW(ErrorKind::internal,
               "cuTensorMapEncodeTiled fails with error " << static_cast<int>(status));
  return map;
}

}  // namespace

CUtensorMap byte_matrix(const void* data, int64_t rows, int row_bytes, int box_rows) {
  return matrix(CU_TENSOR_MAP_DATA_TYPE_UINT8, data, rows, row_bytes, 1, row_bytes, box_rows);
}

CUtensorMap panel_matrix(const void* data, int64_t rows, int columns, int box_rows) {
  return matrix(CU_TENSOR_MAP_DATA_TYPE_UINT16, data, rows, columns, 2, 64, box_rows);
}

}  // namespace sagebwd::cuda
