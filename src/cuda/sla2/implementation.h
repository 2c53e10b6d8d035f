// SPDX-License-Identifier: Apache-2.0
// Sparse-linear attention on a GPU: its linear branch, and what stands around the branches.
#pragma once

#include <array>
#include <cstdint>

#include "backend/sla2.h"

namespace sagebwd::cuda::sla2 {

/// Head dims of the linear branch, of 16-bit tensors.
inline constexpr std::array<int64_t, 2> kHeadDims{64, 128};

/// For every GPU since compute capability 8.0, like cuda-sm80, whose name it has.
const backend::Sla2& implementation();

}  // namespace sagebwd::cuda::sla2
