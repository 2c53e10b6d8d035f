// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cuda_runtime_api.h>

#include "cuda/sm90/params.h"
#include "sagebwd/types.h"

namespace sagebwd::cuda::sm90 {

inline constexpr int kBackwardKeys = 128;  // of a thread block

// Queries of a tile share a scale of P for dV and one of dS for dK, per key. With 128 channels
// there are 64. With 64 channels there are registers for 128 too, and the recipe may choose: 128
// are faster, 64 more exact.
inline constexpr int kDefaultQueriesAt64 = 128;
constexpr bool has_tiles_of(int queries, int d) {
  return queries == 64 || (queries == 128 && d == 64);
}
/// `asked`: by the recipe; 0: it does not say.
constexpr int backward_queries(int d, int asked) {
  return has_tiles_of(asked, d) ? asked : d == 64 ? kDefaultQueriesAt64 : 64;
}

/// dK and dV, and dQ added up in p.dq_sum. queries: of a tile.
void launch_backward(const BackwardParams& p, Dtype dtype, int d, int queries,
                     cudaStream_t stream);

}  // namespace sagebwd::cuda::sm90
