// SPDX-License-Identifier: Apache-2.0
#include <cuda_runtime_api.h>

#include <cstdio>

#include "cuda/cuda.h"

namespace sagebwd::cuda {

std::vector<std::string> describe_devices() {
  int count = 0, driver = 0;
  cudaError_t status = cudaGetDeviceCount(&count);
  if (status == cudaSuccess) status = cudaDriverGetVersion(&driver);
  if (status != cudaSuccess) {
    cudaGetLastError();  // the next call must not find our question's answer
    return {std::string("none: ") + cudaGetErrorString(status)};
  }
  std::vector<std::string> lines;
  for (int i = 0; i < count; ++i) {
    cudaDeviceProp device{};
    if (cudaGetDeviceProperties(&device, i) != cudaSuccess) {
      cudaGetLastError();
      lines.push_back("device " + std::to_string(i) + " does not answer");
      continue;
    }
    char text[128];
    std::snprintf(text, sizeof(text), ", compute capability %d.%d, %.0f GiB, driver for CUDA %d.%d",
                  device.major, device.minor,
                  static_cast<double>(device.totalGlobalMem) / (1024.0 * 1024.0 * 1024.0),
                  driver / 1000, driver % 1000 / 10);
    lines.push_back(device.name + std::string(text));
  }
  if (lines.empty()) lines.push_back("none");
  return lines;
}

}  // namespace sagebwd::cuda
