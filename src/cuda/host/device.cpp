// SPDX-License-Identifier: Apache-2.0
#include "cuda/host/device.h"

#include <cuda_runtime_api.h>

#include <array>
#include <atomic>

namespace sagebwd::cuda {
namespace {

/// Compute capability `major`.x of the current device. A small call would notice how often it is
/// asked for, so the answer of each device is kept.
cudaError_t find_major(int& major) {
  static std::array<std::atomic<int>, 64> known{};  // 0: not yet
  int device = 0;
  if (const cudaError_t status = cudaGetDevice(&device); status != cudaSuccess) return status;
  const auto at = static_cast<std::size_t>(device);
  major = at < known.size() ? known[at].load() : 0;
  if (major != 0) return cudaSuccess;
  const cudaError_t status =
      cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device);
  if (status == cudaSuccess && at < known.size()) known[at] = major;
  return status;
}

}  // namespace

std::string decline_device(int least, int most, const char* only) {
  int major = 0;
  if (const cudaError_t status = find_major(major); status != cudaSuccess) {
    cudaGetLastError();  // clear the error, or the next check would report it
    return std::string("no usable CUDA device: ") + cudaGetErrorString(status);
  }
  if (major < least)
    return "needs a GPU of compute capability " + std::to_string(least) + ".0 or later";
  return major > most ? only : "";
}

}  // namespace sagebwd::cuda
