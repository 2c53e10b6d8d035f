// SPDX-License-Identifier: Apache-2.0
// cuda-sm90: kernels for Hopper, whose warpgroups multiply asynchronously.
#pragma once

#include "backend/implementation.h"

namespace sagebwd::cuda::sm90 {

const backend::Implementation& implementation();

}  // namespace sagebwd::cuda::sm90
