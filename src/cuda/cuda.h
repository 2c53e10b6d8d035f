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

const backend::Mix& mix_calls();

/// One line per GPU, with the driver; or a single line that says why there is none.
std::vector<std::string> describe_devices();

}  // namespace sagebwd::cuda
