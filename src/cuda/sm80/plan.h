// SPDX-License-Identifier: Apache-2.0
// Sizes of a call.
#pragma once

#include <cstdint>

#include "backend/implementation.h"
#include "cuda/host/blocks.h"
#include "spec/problem.h"

namespace sagebwd::cuda::sm80 {

/// Blocks of kBlock tokens, and the padded totals: upper bounds when the documents are on the
/// device.
struct Plan {
  explicit Plan(const spec::Problem& p);

  Blocks blocks;
  int padded_d;
  int num_sequences;
  int q_blocks, k_blocks;  // all sequences
  int64_t tq, tk;          // padded tokens
  // Row-major codes are the saved ones, because those need no padding. The mark of a poisoned key
  // does no harm there: the key's scale is NaN.
  bool q8_is_saved, k8_is_saved;
};

backend::Tiles tiles_of(const spec::Problem& p);

/// The matmuls of the call whose operand is rounded by dither.
inline uint32_t dithered_in(const spec::Problem& p) {
  const uint32_t here = p.direction == spec::Direction::forward
                            ? uint32_t{kMatmulO}
                            : kMatmulDitherable & ~uint32_t{kMatmulO};
  return p.recipe.rounding == Rounding::dither ? p.recipe.dithered & here : 0;
}

}  // namespace sagebwd::cuda::sm80
