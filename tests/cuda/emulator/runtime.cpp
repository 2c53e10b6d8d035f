// SPDX-License-Identifier: Apache-2.0
// The calls of the CUDA runtime that the library and its tests make. Device memory is the heap's,
// where the address sanitizer watches it; every call is done when it returns. At the end, what
// stands in for host/target.cu.
#include <cuda_runtime_api.h>

#include <cstdlib>
#include <cstring>

#include "cuda/arch/target.cuh"
#include "cuda/host/target.h"
#include "emulator/options.h"

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
      *value = 9;
      break;
    case cudaDevAttrMultiProcessorCount:
      *value = 2;
      break;
  }
  return cudaSuccess;
}

int sagebwd::cuda::shared_memory() {
  return arch::shared_memory_for(static_cast<size_t>(emulator::options().shared_memory));
}
