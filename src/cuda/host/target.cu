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

/// What the code here was compiled for, as 10 · compute capability; 0 without a device.
int find_version(int) {
  cudaFuncAttributes code{};
  if (cudaFuncGetAttributes(&code, probe_kernel) == cudaSuccess) return code.ptxVersion;
  cudaGetLastError();  // clear the error, or the next check would report it
  return 0;
}

int find_shared_memory(int device) {
  int bytes = 0;
  const int version = find_version(device);
  if (version > 0 && cudaDeviceGetAttribute(&bytes, cudaDevAttrMaxSharedMemoryPerMultiprocessor,
                                            device) == cudaSuccess)
    return std::min(bytes, arch::shared_memory_of(version * 10));
  cudaGetLastError();
  return 0;
}

/// A number per device that takes time to find; 0 is not known.
template <int (*find)(int device)>
int of_device() {
  static std::array<std::atomic<int>, 64> known{};
  int device = 0;
  if (cudaGetDevice(&device) != cudaSuccess) {
    cudaGetLastError();
    return 0;
  }
  if (device >= static_cast<int>(known.size())) return find(device);
  std::atomic<int>& number = known[static_cast<std::size_t>(device)];
  if (number == 0) number = find(device);
  return number;
}

}  // namespace

int shared_memory() { return of_device<find_shared_memory>(); }
bool made_for_hopper() { return of_device<find_version>() == 90; }
bool can_start_early() { return of_device<find_version>() >= 90; }

}  // namespace sagebwd::cuda
