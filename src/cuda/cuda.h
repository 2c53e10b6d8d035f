// SPDX-License-Identifier: Apache-2.0
// The CUDA backend as the dispatcher sees it.
#pragma once

#include <string>
#include <vector>

#include "backend/implementation.h"
#include "backend/mix.h"

namespace sagebwd::cuda {

/// Best first.
std::vector<const backend::Implementation*> implementations();

/// What sagebwd::tuned_head_dim says.
int64_t tuned_head_dim(Dtype dtype);

const backend::Mix& mix_calls();

/// One line per GPU, with the driver; or a single line that says why there is none.
std::vector<std::string> describe_devices();

}  // namespace sagebwd::cuda
