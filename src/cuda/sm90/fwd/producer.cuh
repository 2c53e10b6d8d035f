// SPDX-License-Identifier: Apache-2.0
// The producer: one warp that fetches work and starts the copies of queries and keys.
#pragma once

#include <cstddef>
#include <cstdint>

#include "cuda/arch/mbarrier.cuh"
#include "cuda/sm90/fwd/shared.cuh"

namespace sagebwd::cuda::sm90::fwd {

template <int D>
struct Producer {
  using Plan = SharedPlan<D>;

  const ForwardParams& p;
  Plan& shared;
  uint32_t lane;
  Ring<kStages> stage{1};  // the first round finds everything empty
  Ring<kSlots> slot{1};

  /// The next piece of work; every lane gets it. Returns false when there is none left.
  __device__ bool fetch(Work& w) const {
    const uint32_t all = static_cast<uint32_t>(p.q_blocks) * static_cast<uint32_t>(p.h);
    for (;;) {
      uint32_t index = 0;
      if (lane == 0) index = atomicAdd(p.next, 1u);
      index = __shfl_sync(0xffffffffu, index, 0);
      if (index >= all) return false;
      if (work_at(w, p, index)) return true;
    }
  }

  __device__ void load_queries(const Work& w) {
    const uint32_t full = arch::shared_address(&shared.slot_full[slot.place]);
    arch::barrier_wait(arch::shared_address(&shared.slot_empty[slot.place]), slot.parity);
    const int rows = min(kQueries, static_cast<int>(p.h * p.tq - w.row));
#pragma unroll
    for (int i = 0; i < kQueries / 32; ++i) {
      const int at = i * 32 + static_cast<int>(lane);
      shared.logit_factor[slot.place][at] =
          at < rows ? p.logit_factor[static_cast<uint64_t>(w.row) + at] : 1.0f;
    }
    if (lane == 0) shared.work[slot.place] = w;
    __syncwarp();
    if (lane == 0) {
      arch::barrier_expect(full, Plan::kSlotBytes);
      arch::copy_rows(arch::shared_address(&shared.slot[slot.place]), p.q8, 0,
                      static_cast<int>(w.row), full);
    }
    slot.advance();
  }

  __device__ void load_keys(const Work& w, int tile) {
    if (lane == 0) {
      const uint32_t full = arch::shared_address(&shared.stage_full[stage.place]),
                     to = arch::shared_address(&shared.stage[stage.place]),
                     row = w.keys + static_cast<uint32_t>(tile) * kKeys;
      arch::barrier_wait(arch::shared_address(&shared.stage_empty[stage.place]), stage.parity);
      arch::barrier_expect(full, Plan::kStageBytes);
      arch::copy_rows(to, p.k8, 0, static_cast<int>(row), full);
      arch::copy_rows(to + kKeys * D, p.v8t, 0, static_cast<int>(row / kSlab * D), full);
      arch::copy_bulk(arch::shared_address(shared.v_share[stage.place]), p.v_share + row,
                      sizeof(shared.v_share[0]), full);
      arch::copy_bulk(arch::shared_address(&shared.scales[stage.place]), p.scales + row / kKeys,
                      sizeof(shared.scales[0]), full);
    }
    stage.advance();
  }

  __device__ void run() {
    Work w;
    while (fetch(w)) {
      load_queries(w);
      for (int step = 0; step < w.walk.steps; ++step) load_keys(w, w.walk.tile(step));
    }
    arch::barrier_wait(arch::shared_address(&shared.slot_empty[slot.place]), slot.parity);
    if (lane == 0) {
      shared.work[slot.place].last = true;
      arch::barrier_arrive(arch::shared_address(&shared.slot_full[slot.place]));
    }
  }
};

}  // namespace sagebwd::cuda::sm90::fwd
