// SPDX-License-Identifier: Apache-2.0
// Sizes of a call.
#pragma once

#include <algorithm>
#include <cstdint>

#include "cuda/host/blocks.h"
#include "cuda/tile/layout.h"
#include "spec/problem.h"

namespace sagebwd::cuda::tuned {

/// Blocks of kBlock tokens, and the padded totals: upper bounds when the documents are on the
/// device.
struct Plan {
  explicit Plan(const spec::Problem& p)
      : blocks(p, kBlock),
        padded_d(p.d <= 64 ? 64 : 128),
        num_sequences(static_cast<int>(p.num_sequences())),
        q_blocks(static_cast<int>(blocks.q)),
        k_blocks(static_cast<int>(blocks.k)),
        tq(blocks.q * kBlock),
        tk(blocks.k * kBlock) {
    const bool fits = p.has_codes && !p.packed() && p.d == padded_d;
    q8_is_saved = fits && p.nq % kBlock == 0, k8_is_saved = fits && p.nk % kBlock == 0;
  }

  Blocks blocks;
  int padded_d;
  int num_sequences;
  int q_blocks, k_blocks;  // all sequences
  int64_t tq, tk;          // padded tokens
  // Row-major codes are the saved ones, because those need no padding.
  bool q8_is_saved, k8_is_saved;
};

/// Sequences that share the padded tokens evenly. Packed documents count as one.
inline int64_t sequences_apart(const spec::Problem& p) {
  return p.packed() ? 1 : std::max<int64_t>(p.b, 1);
}

}  // namespace sagebwd::cuda::tuned
