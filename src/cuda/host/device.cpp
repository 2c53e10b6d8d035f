// SPDX-License-Identifier: Apache-2.0
#include "cuda/host/device.h"

#include <cuda_runtime_api.h>

#include "cuda/host/check.h"

namespace sagebwd::cuda {

int multiprocessors() {
  int device = 0, count = 0;
  SAGE_CUDA(cudaGetDevice(&device));
  SAGE_CUDA(cudaDeviceGetAttribute(&count, cudaDevAttrMultiProcessorCount, device));
  return count;
}

std::string decline_device(int major) {
  int device = 0, has = 0;
  cudaError_t status = cudaGetDevice(&device);
  if (status == cudaSuccess)
    status = cudaDeviceGetAttribute(&has, cudaDevAttrComputeCapabilityMajor, device);
  if (status != cudaSuccess) {
    cudaGetLastError();  // clear the error, or the next check would report it
    return std::string("no usable CUDA device: ") + cudaGetErrorString(status);
  }
  return has >= major
             ? ""
             : "needs a GPU of compute capability " + std::to_string(major) + ".0 or later";
}

}  // namespace sagebwd::cuda
