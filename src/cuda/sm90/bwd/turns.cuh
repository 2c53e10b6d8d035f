// SPDX-License-Identifier: Apache-2.0
// The order in which thread blocks add to dQ.
//
// Deterministic calls add in turn: of the keys that see a tile of queries, the last come first. So
// a thread block waits for those behind it in the sequence. It takes its keys by a ticket, and of a
// sequence the last keys have the lowest tickets (tile/tickets.cuh): whatever a thread block waits
// for has started before it, so nothing waits forever, however few run at the same time.
//
// A sum of dQ belongs to the same warp of the warpgroup of dQ in every thread block. Each of these
// warps has turns of its own, so no barrier of the warpgroup is needed. The four start their
// products together, so they wait for each other nevertheless; but never for a higher ticket.
#pragma once

#include <cstdint>

#include "cuda/arch/global_order.cuh"
#include "cuda/sm90/bwd/work.cuh"

namespace sagebwd::cuda::sm90::bwd {

/// A warp's turns. All lanes come to each of its functions.
template <Wants kWants>
class Turns {
 public:
  __device__ Turns(uint32_t* turns, uint32_t warp, uint32_t lane)
      : turns_(turns), warp_(warp), lane_(lane) {}

  /// Looks early whether the turn of a tile has come, while there is time to wait for the answer.
  /// `last`: of its queries. row: of the first of the 64 that are added to.
  __device__ __forceinline__ void ask(const Walk& w, int last, uint32_t row) {
    if (has_none()) return;
    next_ = row / 16 + warp_;
    before_ = static_cast<uint32_t>(tile::last_key_tile(w.band, w.s, last, kKeys) - w.key0 / kKeys);
    has_come_ = arch::load_acquire(turns_ + next_) == before_;
  }
  /// Until all that come before have added to the tile.
  __device__ __forceinline__ void wait() {
    if (has_none()) return;
    while (!__all_sync(0xffffffffu, has_come_)) {
      __nanosleep(20);
      has_come_ = arch::load_acquire(turns_ + next_) == before_;
    }
    mine_ = next_;
  }
  /// Passes the turn on, if the warp has one. This waits until the warp's additions have arrived,
  /// so it comes late: in the next round of the loop, when they have.
  __device__ __forceinline__ void pass() {
    __syncwarp();
    if (lane_ == 0 && mine_ != kNone) arch::add_release(turns_ + mine_, 1);
  }

 private:
  __device__ bool has_none() const { return kWants == Wants::what_comes && turns_ == nullptr; }

  static constexpr uint32_t kNone = 0xffffffffu;
  uint32_t* turns_;
  uint32_t warp_, lane_;
  uint32_t next_ = kNone, before_ = 0, mine_ = kNone;
  bool has_come_ = false;
};

/// Nobody waits.
template <>
class Turns<Wants::nothing> {
 public:
  __device__ Turns(uint32_t*, uint32_t, uint32_t) {}
  __device__ __forceinline__ void ask(const Walk&, int, uint32_t) {}
  __device__ __forceinline__ void wait() {}
  __device__ __forceinline__ void pass() {}
};

}  // namespace sagebwd::cuda::sm90::bwd
