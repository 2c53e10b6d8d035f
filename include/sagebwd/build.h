// SPDX-License-Identifier: Apache-2.0
// What this build of the library can run, and the GPUs it sees.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "sagebwd/types.h"

namespace sagebwd {

/// Whether the library was built with the CUDA backend.
SAGEBWD_API bool has_cuda();

/// The backends, in words: "CPU", or "CPU and CUDA (nvcc 13.0.88, for 80-real 90-real 80-virtual)".
SAGEBWD_API std::string describe_build();

/// The largest head dim that kernels tuned for GPUs serve in this dtype, if v has that of q and k;
/// 0: none does. Where v has another, plain kernels serve the call, and it pays to pad the smaller
/// one up to this size with zeros.
SAGEBWD_API int64_t tuned_head_dim(Dtype dtype);

/// The head dims that the linear branch (sagebwd/linear.h) serves on GPUs in this dtype. On a CPU
/// it serves all that attention does.
SAGEBWD_API std::vector<int64_t> linear_head_dims(Dtype dtype);

/// One line per GPU, with the driver; or a single line that says why there is none to use.
SAGEBWD_API std::vector<std::string> describe_gpus();

}  // namespace sagebwd
