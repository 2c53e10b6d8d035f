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

/// The first dimension's elements lie behind one another; strides are bytes between those of the
/// others.
template <int kDimensions>
CUtensorMap encode(CUtensorMapDataType type, const void* data,
                   const cuuint64_t (&sizes)[kDimensions],
                   const cuuint64_t (&strides)[kDimensions - 1],
                   const cuuint32_t (&box)[kDimensions], CUtensorMapSwizzle swizzle) {
  CUtensorMap map;
  cuuint32_t steps[kDimensions];
  for (cuuint32_t& step : steps) step = 1;
  const CUresult status =
      encoder()(&map, type, kDimensions, const_cast<void*>(data), sizes, strides, box, steps,
                CU_TENSOR_MAP_INTERLEAVE_NONE, swizzle, CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
                CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  if (status != CUDA_SUCCESS)
    SAGE_THROW(ErrorKind::internal,
               "cuTensorMapEncodeTiled fails with error " << static_cast<int>(status));
  return map;
}

}  // namespace

CUtensorMap byte_matrix(const void* data, int64_t rows, int row_bytes, int box_rows) {
  const auto bytes = static_cast<cuuint64_t>(row_bytes);
  return encode<2>(CU_TENSOR_MAP_DATA_TYPE_UINT8, data, {bytes, static_cast<cuuint64_t>(rows)},
                   {bytes}, {static_cast<cuuint32_t>(row_bytes), static_cast<cuuint32_t>(box_rows)},
                   row_bytes == 128 ? CU_TENSOR_MAP_SWIZZLE_128B : CU_TENSOR_MAP_SWIZZLE_64B);
}

CUtensorMap panel_matrix(const void* data, int64_t rows, int columns, int box_rows) {
  constexpr cuuint32_t kPanel = 64;  // columns
  const cuuint32_t panels = static_cast<cuuint32_t>(columns) / kPanel;
  return encode<3>(CU_TENSOR_MAP_DATA_TYPE_UINT16, data,
                   {kPanel, static_cast<cuuint64_t>(rows), panels},
                   {static_cast<cuuint64_t>(columns) * 2, kPanel * 2},
                   {kPanel, static_cast<cuuint32_t>(box_rows), panels}, CU_TENSOR_MAP_SWIZZLE_128B);
}

bool token_map(CUtensorMap& map, const Strided& x, int64_t b, int64_t h, int64_t n, int d,
               int box_tokens) {
  constexpr cuuint32_t kPanel = 64;  // channels
  constexpr int64_t kEnd = int64_t{1} << 39;
  if (x.head == 0) h = 1;
  if (x.batch == 0) b = 1;
  const auto fits = [](int64_t size, int64_t stride) {
    return size == 1 || (stride > 0 && stride < kEnd);
  };
  if (!x.vector || !fits(n, x.token) || !fits(h, x.head) || !fits(b, x.batch)) return false;
  const auto bytes = [](int64_t size, int64_t stride) {
    return static_cast<cuuint64_t>(size == 1 ? 16 : stride * 2);
  };
  const cuuint32_t panels = static_cast<cuuint32_t>(d) / kPanel;
  map = encode<5>(CU_TENSOR_MAP_DATA_TYPE_UINT16, x.data,
                  {kPanel, static_cast<cuuint64_t>(n), panels, static_cast<cuuint64_t>(h),
                   static_cast<cuuint64_t>(b)},
                  {bytes(n, x.token), kPanel * 2, bytes(h, x.head), bytes(b, x.batch)},
                  {kPanel, static_cast<cuuint32_t>(box_tokens), panels, 1, 1},
                  CU_TENSOR_MAP_SWIZZLE_128B);
  return true;
}

}  // namespace sagebwd::cuda
