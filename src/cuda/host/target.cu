// SPDX-License-Identifier: Apache-2.0
#include <cuda_runtime.h>

#include <algorithm>
#include <array>
#include <atomic>

#include "cuda/arch/target.cuh"
#include "cuda/host/target.h"

namespace sagebwd::cuda {
namespace {

/// Says for which target the code that runs here was compiled.
__global__ void probe_kernel() {}

int find_shared_memory(int device) {
  int bytes = 0;
  cudaFuncAttributes code{};
  if (cudaDeviceGetAttribute(&bytes, cudaDevAttrMaxSharedMemoryPerMultiprocessor, device) ==
          cudaSuccess &&
      cudaFuncGetAttributes(&code, probe_kernel) == cudaSuccess)
    return std::min(bytes, arch::shared_memory_of(code.ptxVersion * 10));
  cudaGetLastError();  // clear the error, or the next check would report it
  return 0;
}

}  // namespace

int shared_memory() {
  static std::array<std::atomic<int>, 64> known{};  // per device, because asking takes time
  int device = 0;
  if (cudaGetDevice(&device) != cudaSuccess) {
    cudaGetLastError();
    return 0;
  }
  if (device >= static_cast<int>(known.size())) return find_shared_memory(device);
  std::atomic<int>& bytes = known[static_cast<std::size_t>(device)];
  if (bytes == 0) bytes = find_shared_memory(device);
  return bytes;
}

}  // namespace sagebwd::cuda
