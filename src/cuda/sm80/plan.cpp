// SPDX-License-Identifier: Apache-2.0
#include "cuda/sm80/plan.h"

#include "cuda/lists/lists.h"
#include "cuda/sm80/bwd/bwd.h"
#include "cuda/tile/layout.h"

namespace sagebwd::cuda::sm80 {

Plan::Plan(const spec::Problem& p)
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

backend::Tiles tiles_of(const spec::Problem& p) {
  const bool paper = p.recipe.scheme == Scheme::paper;
  // A tile lies within one block of a list.
  if (p.has_lists())
    return {kListedQueries,
            p.direction == spec::Direction::forward && p.blocks.block_k % 128 == 0 ? 128 : 64,
            spec::p_levels(p.recipe, 255)};
  if (p.direction == spec::Direction::forward)
    return {128, paper ? 64 : 128, spec::p_levels(p.recipe, 255)};
  const BackwardTiles t = backward_tiles(p.recipe.scheme, p.d <= 64 ? 64 : 128);
  return {t.q, t.k, spec::p_levels(p.recipe, 255)};
}

}  // namespace sagebwd::cuda::sm80
