// SPDX-License-Identifier: Apache-2.0
// cuda-sm80: tuned mma.sync kernels for every GPU since compute capability 8.0.
#pragma once

#include "backend/implementation.h"

namespace sagebwd::cuda::sm80 {

/// The largest head dim that these kernels serve, of 16-bit tensors.
inline constexpr int64_t kMostHeadDim = 128;

const backend::Implementation& implementation();

}  // namespace sagebwd::cuda::sm80
