// SPDX-License-Identifier: Apache-2.0
// The CUDA backend as the dispatcher sees it.
#pragma once

#include <string>
#include <vector>

#include "backend/implementation.h"
#include "backend/sla2.h"

namespace sagebwd::cuda {

/// Best first.
std::vector<const backend::Implementation*> implementations();
std::vector<const backend::Sla2*> sla2_implementations();

/// What sagebwd::tuned_head_dim says.
int64_t tuned_head_dim(Dtype dtype);
/// What sagebwd::linear_head_dims says.
std::vector<int64_t> linear_head_dims(Dtype dtype);

/// One line per GPU, with the driver; or a single line that says why there is none.
std::vector<std::string> describe_devices();

}  // namespace sagebwd::cuda
