// SPDX-License-Identifier: Apache-2.0
// The tiles of a call, and what of it is dithered.
#pragma once

#include <cstdint>

#include "backend/implementation.h"
#include "spec/problem.h"

namespace sagebwd::cuda::sm80 {

backend::Tiles tiles_of(const spec::Problem& p);

/// The matmuls of the call whose operand is rounded by dither.
inline uint32_t dithered_in(const spec::Problem& p) {
  const uint32_t here = p.direction == spec::Direction::forward
                            ? uint32_t{kMatmulO}
                            : kMatmulDitherable & ~uint32_t{kMatmulO};
  return p.recipe.rounding == Rounding::dither ? p.recipe.dithered & here : 0;
}

}  // namespace sagebwd::cuda::sm80
