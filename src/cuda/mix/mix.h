// SPDX-License-Identifier: Apache-2.0
// Mixing and means of blocks (sagebwd/mix.h) on a GPU. jobs.h has the kernels.
#pragma once

#include "backend/mix.h"

namespace sagebwd::cuda::mix {

const backend::Mix& implementation();

}  // namespace sagebwd::cuda::mix
