// SPDX-License-Identifier: Apache-2.0
// How a call's sequences are cut into blocks of tokens.
#pragma once

#include <cstdint>
#include <vector>

#include "cuda/tile/sequences.h"
#include "spec/problem.h"

namespace sagebwd::cuda {

/// Blocks of `tokens` tokens. Every sequence starts a new one.
struct Blocks {
  Blocks(const spec::Problem& p, int tokens_per_block);

  /// The form that kernels take. `table`: the table of documents on the device, when packed.
  Sequences sequences(const spec::Problem& p, const DocumentStart* table) const;

  int tokens;
  int64_t q = 0, k = 0;  // of all sequences; upper bounds with documents on the device
  std::vector<DocumentStart> documents;  // [count + 1] when packed, with offsets on the host
};

}  // namespace sagebwd::cuda
