// SPDX-License-Identifier: Apache-2.0
#include "cuda/sm80/tiles.h"

#include "cuda/lists/lists.h"
#include "cuda/sm80/bwd/bwd.h"

namespace sagebwd::cuda::sm80 {

backend::Tiles tiles_of(const spec::Problem& p) {
  const bool paper = p.recipe.scheme == Scheme::paper;
  // A tile lies within one block of a list.
  if (p.has_lists())
    return {kListedQueries,
            p.direction == spec::Direction::forward && p.blocks.block_k % 128 == 0 ? 128 : 64,
            spec::p_levels(p.recipe.scheme, 255)};
  if (p.direction == spec::Direction::forward)
    return {128, paper ? 64 : 128, spec::p_levels(p.recipe.scheme, 255)};
  const BackwardTiles t = backward_tiles(paper, p.d <= 64 ? 64 : 128);
  return {t.q, t.k, spec::p_levels(p.recipe.scheme, 255)};
}

}  // namespace sagebwd::cuda::sm80
