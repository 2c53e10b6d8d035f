// SPDX-License-Identifier: Apache-2.0
// The sequences of a call and their mask, as they cross from host to device.
//
// In a workspace the tokens of all sequences follow one another. Each sequence starts a new block.
// Kernels choose how many tokens a block has (tile/layout.h, plain/params.h).
#pragma once

#include <cstdint>

namespace sagebwd::cuda {

/// Where one document of a packed batch starts; an array of these has one entry more than there are
/// documents.
struct DocumentStart {
  int32_t q, k;              // tokens, in the caller's tensors
  int32_t q_block, k_block;  // blocks, in the workspace
};

/// All sequences of a call.
struct Sequences {
  int count;
  int64_t nq, nk;                            // of each sequence, when not packed
  int q_blocks, k_blocks;                    // of each sequence, when not packed
  const DocumentStart* documents = nullptr;  // [count + 1]; null: not packed
};

/// Query i sees keys i + shift - left … i + shift + right, where shift is nk - nq if bottom_right
/// and else 0. A side that is -1 has no limit.
struct MaskParams {
  bool bottom_right;
  int64_t left, right;
};

}  // namespace sagebwd::cuda
