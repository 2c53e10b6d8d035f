// SPDX-License-Identifier: Apache-2.0
// The CUDA backend as the dispatcher sees it.
#pragma once

#include <vector>

#include "dispatch/implementation.h"

namespace sagebwd::cuda {

/// Best first.
std::vector<const dispatch::Implementation*> implementations();

}  // namespace sagebwd::cuda
