// SPDX-License-Identifier: Apache-2.0
// The order in which thread blocks of the fused backward add to dQ.
//
// Deterministic calls add in turn: the last keys that see a query come first. So a thread block
// waits for those behind it in the sequence. It takes its keys by a ticket, and of a sequence the
// last keys have the lowest tickets (tile/tickets.cuh): whatever a thread block waits for has
// started before it, so nothing waits forever, however few run at the same time. Under a causal
// mask the keys behind it are also ahead of it in their walk, and nobody waits. Under a full mask
// all walks start at the same tile, and nobody waits if the keys behind it have started a tile
// earlier.
//
// A value of dQ belongs to the same warp in every thread block. Each of those warps has turns of
// its own and waits for no other.
#pragma once

#include <cstdint>

#include "cuda/arch/global_order.cuh"
#include "cuda/sm80/bwd/fused/config.cuh"
#include "cuda/sm80/bwd/fused/shared.cuh"
#include "cuda/sm80/bwd/fused/walk.cuh"
#include "cuda/sm80/params.h"

namespace sagebwd::cuda::sm80::fused_backward {

/// A warp's turns. The one it has and has not passed on lies in shared memory, because the loop has
/// no register for it. Passing on waits for the additions to arrive, so it comes late: in the next
/// round of the loop, when they have.
template <Config kConfig>
struct Turns {
  __device__ static void reset(const Thread<kConfig>& me) {
    if constexpr (kMayBeWanted)
      if (me.lane() == 0) mine(me) = kNone;
  }
  /// Until all that come before have added to the tile. The whole warp comes here.
  __device__ static void wait(const Thread<kConfig>& me, const Tile& tile) {
    if constexpr (kMayBeWanted) {
      if (me.p.turns == nullptr) return;
      const uint32_t strip = tile.row / kWarpQueries + me.query_strip(),
                     turn = strip * kConfig.key_strips + me.key_strip(),
                     before = me.walk().template turn<kConfig>(me.p, tile);
      while (!__all_sync(0xffffffffu, arch::load_acquire(me.p.turns + turn) == before))
        __nanosleep(20);
      if (me.lane() == 0) mine(me) = turn;
    }
  }
  /// Behind the warp's additions; does nothing if it has no turn.
  __device__ static void pass(const Thread<kConfig>& me) {
    if constexpr (kMayBeWanted) {
      __syncwarp();
      if (me.lane() != 0 || mine(me) == kNone) return;
      arch::add_release(me.p.turns + mine(me), 1);
      mine(me) = kNone;
    }
  }

 private:
  static constexpr bool kMayBeWanted = kConfig.general();
  static constexpr uint32_t kNone = 0xffffffffu;
  __device__ static uint32_t& mine(const Thread<kConfig>& me) {
    return at<uint32_t>(me.shared + offsetof(SharedPlan<kConfig>, extras.turn) + me.warp() * 4);
  }
};

}  // namespace sagebwd::cuda::sm80::fused_backward
