// SPDX-License-Identifier: Apache-2.0
// How tuned kernels lay tokens out in the workspace: each sequence is padded to whole blocks.
#pragma once

namespace sagebwd::cuda {

inline constexpr int kBlock = 128;  // tokens per padded block
inline constexpr int kSlab = 64;    // tokens per row of a transposed copy

}  // namespace sagebwd::cuda
