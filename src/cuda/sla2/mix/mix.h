// SPDX-License-Identifier: Apache-2.0
// Mixing and means of blocks (sagebwd/mix.h) on a GPU. jobs.h has the kernels.
#pragma once

#include "backend/sla2.h"

namespace sagebwd::cuda::sla2::mix {

const backend::Mix& calls();

}  // namespace sagebwd::cuda::sla2::mix
