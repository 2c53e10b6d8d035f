// SPDX-License-Identifier: Apache-2.0
// How tuned kernels lay tokens out in the workspace. Each sequence is padded to whole blocks. A
// transposed operand is cut into slabs: a slab holds all channels of kSlab tokens, a row per
// channel.
#pragma once

namespace sagebwd::cuda {

inline constexpr int kBlock = 128;  // tokens of a block
inline constexpr int kSlab = 64;    // tokens of a slab

}  // namespace sagebwd::cuda
