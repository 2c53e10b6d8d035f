// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "backend/implementation.h"
#include "spec/problem.h"

namespace sagebwd::cuda::sm80 {

backend::Tiles tiles_of(const spec::Problem& p);

}  // namespace sagebwd::cuda::sm80
