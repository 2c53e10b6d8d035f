// SPDX-License-Identifier: Apache-2.0
// The driver's function that describes a tensor for bulk copies, with the driver's conditions.
#include <cudaTypedefs.h>
#include <cuda_runtime_api.h>

#include <algorithm>

namespace {

CUresult encode(CUtensorMap* map, CUtensorMapDataType type, cuuint32_t dimensions, void* data,
                const cuuint64_t* sizes, const cuuint64_t* strides, const cuuint32_t* box,
                const cuuint32_t* steps, CUtensorMapInterleave, CUtensorMapSwizzle swizzle,
                CUtensorMapL2promotion, CUtensorMapFloatOOBfill) {
  const int element = type == CU_TENSOR_MAP_DATA_TYPE_UINT8 ? 1 : 2;
  *map = {static_cast<const uint8_t*>(data),
          element,
          static_cast<int>(dimensions),
          {},
          {},
          {},
          swizzle};
  bool good = dimensions >= 1 && dimensions <= 5 && reinterpret_cast<uintptr_t>(data) % 16 == 0;
  for (unsigned i = 0; good && i < dimensions; ++i) {
    map->size[i] = static_cast<int64_t>(sizes[i]), map->box[i] = static_cast<int>(box[i]);
    map->stride[i] = i == 0 ? element : static_cast<int64_t>(strides[i - 1]);
    good = sizes[i] >= 1 && sizes[i] <= uint64_t{1} << 32 && box[i] >= 1 && box[i] <= 256 &&
           steps[i] == 1 &&
           (i == 0 || (map->stride[i] % 16 == 0 && map->stride[i] < int64_t{1} << 40));
  }
  const int most = swizzle == CU_TENSOR_MAP_SWIZZLE_128B ? 128 : 64;
  if (good) good = map->box[0] * element % 16 == 0 && map->box[0] * element <= most;
  return good ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}

}  // namespace

cudaError_t cudaGetDriverEntryPointByVersion(const char*, void** function, unsigned,
                                             unsigned long long,
                                             cudaDriverEntryPointQueryResult* result) {
  *function = reinterpret_cast<void*>(&encode);
  *result = cudaDriverEntryPointSuccess;
  return cudaSuccess;
}
