// SPDX-License-Identifier: Apache-2.0
#include "cuda/host/device.h"

#include <cuda_runtime_api.h>

#include <array>
#include <atomic>
#include <cstdlib>

#include "cuda/host/check.h"

namespace sagebwd::cuda {
namespace {

/// An attribute of the devices, rarely 0. A small call would notice how often it is asked for, so
/// the answer of each device is kept.
class Attribute {
 public:
  explicit Attribute(cudaDeviceAttr which) : which_(which) {}

  cudaError_t of_current_device(int& value) {
    int device = 0;
    if (const cudaError_t status = cudaGetDevice(&device); status != cudaSuccess) return status;
    const auto at = static_cast<std::size_t>(device);
    value = at < known_.size() ? known_[at].load() : 0;
    if (value != 0) return cudaSuccess;
    const cudaError_t status = cudaDeviceGetAttribute(&value, which_, device);
    if (status == cudaSuccess && at < known_.size()) known_[at] = value;
    return status;
  }

 private:
  cudaDeviceAttr which_;
  std::array<std::atomic<int>, 64> known_{};  // 0: not yet
};

}  // namespace

int multiprocessors() {
  static Attribute attribute(cudaDevAttrMultiProcessorCount);
  int count = 0;
  SAGE_CUDA(attribute.of_current_device(count));
  return count;
}

std::string decline_device(int least, int most, const char* only) {
  static Attribute attribute(cudaDevAttrComputeCapabilityMajor);
  int major = 0;
  if (const cudaError_t status = attribute.of_current_device(major); status != cudaSuccess) {
    cudaGetLastError();  // clear the error, or the next check would report it
    return std::string("no usable CUDA device: ") + cudaGetErrorString(status);
  }
  if (major < least)
    return "needs a GPU of compute capability " + std::to_string(least) + ".0 or later";
  return major > most ? only : "";
}

std::string slow_int8(int major, int minor) {
  if (major != 10 || minor != 3) return "";
  return "INT8 on this GPU (compute capability 10.3: B300, GB300) has 1/30 of the rate of FP8, so "
         "INT8 attention would be slower than PyTorch's; SAGEBWD_IMPL=cuda-sm80 or cuda-plain runs "
         "it all the same";
}

std::string decline_slow_int8() {
  const char* pinned = std::getenv("SAGEBWD_IMPL");
  if (pinned != nullptr && *pinned != '\0') return "";
  static Attribute major_of(cudaDevAttrComputeCapabilityMajor),
      minor_of(cudaDevAttrComputeCapabilityMinor);
  int major = 0, minor = 0;
  SAGE_CUDA(major_of.of_current_device(major));
  if (major != 10) return "";
  SAGE_CUDA(minor_of.of_current_device(minor));
  return slow_int8(major, minor);
}

}  // namespace sagebwd::cuda
