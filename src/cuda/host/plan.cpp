// SPDX-License-Identifier: Apache-2.0
#include "cuda/host/plan.h"

#include <algorithm>

#include "base/check.h"
#include "base/math.h"
#include "cuda/sm80/bwd/bwd.h"

namespace sagebwd::cuda {

Plan::Plan(const spec::Problem& p) {
  padded_d = p.d <= 64 ? 64 : 128;
  num_sequences = static_cast<int>(p.num_sequences());
  int64_t q = 0, k = 0;
  if (p.packed() && p.documents.on_device) {
    // Each document with a token may have one block that is not full.
    const auto bound = [&](int64_t n) {
      return (n + std::min(p.documents.count, n) * (kBlock - 1)) / kBlock;
    };
    q = bound(p.nq), k = bound(p.nk);
  } else if (p.packed()) {
    for (int64_t t = 0; t <= num_sequences; ++t) {
      documents.push_back({p.documents.cu_q[t], p.documents.cu_k[t], static_cast<int32_t>(q),
                           static_cast<int32_t>(k)});
      if (t == num_sequences) break;
      const spec::Sequence s = p.sequence(t);
      q += ceil_div(s.nq, kBlock), k += ceil_div(s.nk, kBlock);
    }
  } else {
    q = p.b * ceil_div(p.nq, kBlock), k = p.b * ceil_div(p.nk, kBlock);
  }
  q_blocks = static_cast<int>(q), k_blocks = static_cast<int>(k);
  tq = q * kBlock, tk = k * kBlock;
}

bool fused(const spec::Problem& p) {
  return !p.deterministic && !p.partial_kv && p.recipe.rounding == Rounding::nearest &&
         sm80::fused_fits(p.recipe.scheme == Scheme::paper, p.d <= 64 ? 64 : 128);
}

dispatch::Tiles tiles_of(const spec::Problem& p) {
  const bool paper = p.recipe.scheme == Scheme::paper;
  if (p.direction == spec::Direction::forward)
    return {128, paper ? 64 : 128, spec::p_levels(p.recipe, 255)};
  const sm80::BackwardTiles t =
      sm80::backward_tiles(p.recipe.scheme, p.d <= 64 ? 64 : 128, fused(p));
  return {t.q, t.k, spec::p_levels(p.recipe, 255)};
}

}  // namespace sagebwd::cuda
