// SPDX-License-Identifier: Apache-2.0
// The sequences of a call and their mask, as they cross from host to device.
//
// Inside a workspace the tokens of all sequences lie behind one another. Each sequence starts a new
// block; how many tokens a block has is the kernels' choice (tile/layout.h, plain/params.h).
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

/// Query i sees keys i + shift - left … i + shift + right; -1: open. shift = nk - nq if
/// bottom_right.
struct MaskParams {
  bool bottom_right;
  int64_t left, right;
};

}  // namespace sagebwd::cuda
