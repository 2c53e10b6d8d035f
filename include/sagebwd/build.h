// SPDX-License-Identifier: Apache-2.0
// What this build of the library can run, and the GPUs it sees.
#pragma once

#include <string>
#include <vector>

#include "sagebwd/types.h"

namespace sagebwd {

/// Whether the library was built with the CUDA backend.
SAGEBWD_API bool has_cuda();

/// The backends, in words: "CPU", or "CPU and CUDA (nvcc 13.0.88, for 80-real 90-real 80-virtual)".
SAGEBWD_API std::string describe_build();

/// One line per GPU, with the driver; or a single line that says why there is none to use.
SAGEBWD_API std::vector<std::string> describe_gpus();

}  // namespace sagebwd
