// SPDX-License-Identifier: Apache-2.0
// The calls of the CUDA runtime that the library and its tests make. Device memory is the heap's,
// where the address sanitizer watches it; every call is done when it returns.
#include <cuda_runtime_api.h>

#include <cstdlib>
#include <cstring>

#include "emulator/target.h"

cudaError_t cudaMalloc(void** data, size_t bytes) {
  *data = std::aligned_alloc(256, (bytes + 255) / 256 * 256);
  return *data != nullptr ? cudaSuccess : cudaErrorMemoryAllocation;
}
cudaError_t cudaFree(void* data) {
  std::free(data);
  return cudaSuccess;
}
cudaError_t cudaMemcpy(void* to, const void* from, size_t bytes, cudaMemcpyKind) {
  if (bytes > 0) std::memcpy(to, from, bytes);
  return cudaSuccess;
}
cudaError_t cudaMemsetAsync(void* to, int value, size_t bytes, cudaStream_t) {
  std::memset(to, value, bytes);
  return cudaSuccess;
}
cudaError_t cudaDeviceSynchronize() { return cudaSuccess; }

cudaError_t cudaGetLastError() { return cudaSuccess; }
const char* cudaGetErrorString(cudaError_t status) {
  return status == cudaSuccess ? "no error" : "out of memory";
}

cudaError_t cudaGetDeviceCount(int* count) {
  *count = 1;
  return cudaSuccess;
}
cudaError_t cudaGetDevice(int* device) {
  *device = 0;
  return cudaSuccess;
}
cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr attribute, int) {
  switch (attribute) {
    case cudaDevAttrComputeCapabilityMajor:
      *value = sagebwd::emulator::target() / 100;
      break;
    case cudaDevAttrComputeCapabilityMinor:
      *value = sagebwd::emulator::target() / 10 % 10;
      break;
    case cudaDevAttrMultiProcessorCount:
      *value = 2;
      break;
    case cudaDevAttrMaxSharedMemoryPerMultiprocessor:
      *value = sagebwd::emulator::shared_memory();
      break;
  }
  return cudaSuccess;
}
cudaError_t cudaFuncGetAttributes(cudaFuncAttributes* attributes, void (*)()) {
  attributes->ptxVersion = sagebwd::emulator::target() / 10;
  return cudaSuccess;
}
