// SPDX-License-Identifier: Apache-2.0
// cuda-sm80: tuned mma.sync kernels for every GPU since compute capability 8.0.
#pragma once

#include "backend/implementation.h"

namespace sagebwd::cuda::sm80 {

const backend::Implementation& implementation();

}  // namespace sagebwd::cuda::sm80
