// SPDX-License-Identifier: Apache-2.0
#include "cuda/host/blocks.h"

#include <algorithm>

#include "base/math.h"

namespace sagebwd::cuda {

Blocks::Blocks(const spec::Problem& p, int tokens_per_block) : tokens(tokens_per_block) {
  if (!p.packed()) {
    q = p.b * ceil_div(p.nq, tokens), k = p.b * ceil_div(p.nk, tokens);
    return;
  }
  if (p.documents.on_device) {
    // Each document that has tokens may end with a block that is not full.
    const auto bound = [&](int64_t n) {
      return (n + std::min(p.documents.count, n) * (tokens - 1)) / tokens;
    };
    q = bound(p.nq), k = bound(p.nk);
    return;
  }
  for (int64_t t = 0; t <= p.documents.count; ++t) {
    documents.push_back({p.documents.cu_q[t], p.documents.cu_k[t], static_cast<int32_t>(q),
                         static_cast<int32_t>(k)});
    if (t == p.documents.count) break;
    const spec::Sequence s = p.sequence(t);
    q += ceil_div(s.nq, tokens), k += ceil_div(s.nk, tokens);
  }
}

Sequences Blocks::sequences(const spec::Problem& p, const DocumentStart* table) const {
  Sequences s{};
  s.count = static_cast<int>(p.num_sequences());
  s.nq = p.nq, s.nk = p.nk;
  s.q_blocks = static_cast<int>(ceil_div(p.nq, tokens));
  s.k_blocks = static_cast<int>(ceil_div(p.nk, tokens));
  s.documents = p.packed() ? table : nullptr;
  return s;
}

}  // namespace sagebwd::cuda
