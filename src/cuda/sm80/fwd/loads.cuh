// SPDX-License-Identifier: Apache-2.0
// Copies from the workspace to the shared memory of the forward. All threads take part. The copies
// of tiles are only started.
#pragma once

#include <cmath>
#include <cstddef>
#include <cstdint>

#include "cuda/arch/shared_memory.cuh"
#include "cuda/sm80/fwd/shared.cuh"
#include "cuda/tile/layout.h"
#include "cuda/tile/shared_tile.cuh"

namespace sagebwd::cuda::sm80::fwd {

/// The block's Work.
template <Config kConfig>
__device__ void share_work(const Thread<kConfig>& me, const Work<kConfig>& w) {
  using Plan = SharedPlan<kConfig>;
  if (me.index == 0) at<Work<kConfig>>(me.shared + offsetof(Plan, work)) = w, me.any_poisoned() = 0;
  static_assert(kConfig.queries() <= kConfig.threads());
  if (me.index < kConfig.queries()) {
    at<float>(me.shared + offsetof(Plan, logit_top) + me.index * 4) = -INFINITY;
    at<float>(me.shared + offsetof(Plan, sum_before) + me.index * 4) = 0.0f;
  }
}

/// A tile of K8 and V8 with their scales. `row`: its first key in the workspace.
template <Config kConfig>
__device__ void load_tile(const Thread<kConfig>& me, int stage, uint32_t row) {
  using Stage = typename SharedPlan<kConfig>::Stage;
  constexpr int D = kConfig.d, kTileK = kConfig.tile_k, kThreads = kConfig.threads();
  const ForwardParams& p = me.p;
  const uint32_t to = me.stage_at(stage);
  const uint64_t first = static_cast<uint64_t>(row) * D;
  tile::load_tile<kTileK, D, kThreads>(to + offsetof(Stage, k8), p.k8 + first, me.index);
  tile::load_tile<D*(kTileK / kSlab), kSlab, kThreads>(to + offsetof(Stage, v8t), p.v8t + first,
                                                       me.index);
  tile::load_linear<kTileK * sizeof(KeyScale), kThreads>(to + offsetof(Stage, k_scale),
                                                         p.k_scale + row, me.index);
  if constexpr (kConfig.folds_v()) {
    const FoldedScales* of_block = p.folded + row / kBlock;
    if constexpr (kTileK == kBlock) {
      tile::load_linear<sizeof(FoldedScales), kThreads>(to + offsetof(Stage, folded), of_block,
                                                        me.index);
    } else {
      using Folded = TileFolded<kConfig>;
      tile::load_linear<sizeof(Folded::exponent), kThreads>(
          to + offsetof(Stage, folded) + offsetof(Folded, exponent),
          of_block->exponent + row % kBlock, me.index);
      tile::load_linear<sizeof(Folded::inverse), kThreads>(
          to + offsetof(Stage, folded) + offsetof(Folded, inverse),
          of_block->inverse + row % kBlock, me.index);
    }
  }
  // But in `paper` the tiles of a block share this.
  if (me.index == kThreads - 1)
    arch::cp_async_4(to + offsetof(Stage, v_scale),
                     p.v_tile_scale + row / (kConfig.paper ? kTileK : kBlock));
}

/// A tile of V in 16 bit, in the place of codes.
template <typename T, Config kConfig>
__device__ void load_v16(const Thread<kConfig>& me, int stage, int tile) {
  using Stage = typename SharedPlan<kConfig>::Stage;
  constexpr int D = kConfig.d, kTileK = kConfig.tile_k;
  static_assert(offsetof(Stage, k8) == 0 && offsetof(Stage, k_scale) == 2 * kTileK * D);
  tile::load_tile<kTileK, 2 * D, kConfig.threads()>(
      me.stage_at(stage),
      static_cast<const T*>(me.p.v16) + static_cast<uint64_t>(me.key_row(tile)) * D, me.index);
}

/// Waits until all copies of all threads have arrived.
__device__ inline void wait_for_copies() {
  arch::cp_async_wait<0>();
  __syncthreads();
}

}  // namespace sagebwd::cuda::sm80::fwd
