// SPDX-License-Identifier: Apache-2.0
// What this build contains. Only this room sees every backend.
#include "sagebwd/build.h"

#include <filesystem>

#include "dispatch/choose.h"

#ifdef SAGEBWD_HAS_CUDA
#include "cuda/cuda.h"
#endif

namespace sagebwd {

#ifdef SAGEBWD_HAS_CUDA

bool has_cuda() { return true; }
std::string describe_build() { return "CPU and CUDA (" SAGEBWD_CUDA_BUILD ")"; }
int64_t tuned_head_dim(Dtype dtype) { return cuda::tuned_head_dim(dtype); }
std::vector<int64_t> linear_head_dims(Dtype dtype) { return cuda::linear_head_dims(dtype); }
std::vector<std::string> describe_gpus() { return cuda::describe_devices(); }

#else

bool has_cuda() { return false; }
std::string describe_build() { return "CPU"; }
int64_t tuned_head_dim(Dtype) { return 0; }
std::vector<int64_t> linear_head_dims(Dtype) { return {}; }
std::vector<std::string> describe_gpus() {
  std::error_code ignored;
  int count = 0;
  while (std::filesystem::exists("/dev/nvidia" + std::to_string(count), ignored)) ++count;
  if (count == 0) return {"none (no /dev/nvidia0)"};
  return {std::to_string(count) +
          " of NVIDIA, for which this build has no backend: " + dispatch::kHowToGetCuda};
}

#endif

}  // namespace sagebwd
