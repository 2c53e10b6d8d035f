// SPDX-License-Identifier: Apache-2.0
// The producer: one warp that fetches work and starts the copies of queries and keys.
#pragma once

#include <cstddef>
#include <cstdint>

#include "cuda/arch/mbarrier.cuh"
#include "cuda/sm90/fwd/results.cuh"
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

  /// The next piece of work, in its slot. Returns false when there is none left.
  __device__ bool fetch() const {
    const uint32_t all = work_count(p);
    arch::barrier_wait(arch::shared_address(&shared.slot_empty[slot.place]), slot.parity);
    for (;;) {
      uint32_t index = 0;
      if (lane == 0) index = atomicAdd(p.next, 1u);
      index = __shfl_sync(0xffffffffu, index, 0);
      if (index >= all) return false;
      Work w;
      if (!work_at(w, p, index)) continue;
      if (lane == 0) shared.work[slot.place] = w;
      __syncwarp();
      return true;
    }
  }

  __device__ void load_queries(const Work& w) {
    const uint32_t full = arch::shared_address(&shared.slot_full[slot.place]);
    // Behind the last row of all nothing is copied: whatever the queries there have, nobody sees.
    const int rows = min(kQueries, static_cast<int>(p.h * p.tq - w.row));
    const uint32_t row_bytes = static_cast<uint32_t>(rows) * sizeof(float);
    if (lane < kConsumers)
      shared.seen[slot.place][lane] = seen_by(w, p.mask, static_cast<int>(lane));
    __syncwarp();
    if (lane == 0) {
      arch::barrier_expect(full, Plan::kSlotBytes + 2 * row_bytes);
      arch::copy_rows(arch::shared_address(&shared.slot[slot.place]), p.q8, 0,
                      static_cast<int>(w.row), full);
      const auto copy = [&](float* to, const float* from, uint32_t bytes) {
        arch::copy_bulk(arch::shared_address(to), from, bytes, full);
      };
      copy(shared.logit_factor[slot.place], p.logit_factor + w.row, row_bytes);
      copy(shared.mean_logit[slot.place], p.q_mean_logit + w.row, row_bytes);
      copy(shared.v_mean[slot.place], v_mean_of<D>(p, w), sizeof(shared.v_mean[0]));
    }
  }

  __device__ void load_keys(uint32_t keys, int tile) {
    if (lane == 0) {
      const uint32_t full = arch::shared_address(&shared.stage_full[stage.place]),
                     to = arch::shared_address(&shared.stage[stage.place]),
                     row = keys + static_cast<uint32_t>(tile) * kKeys;
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
    for (; fetch(); slot.advance()) {
      const Work& w = shared.work[slot.place];
      load_queries(w);
      const uint32_t keys = w.keys;
      const int first = w.walk.first, end = first + w.walk.steps;
      for (int tile = first; tile < end; ++tile) load_keys(keys, tile);
    }
    if (lane == 0) {
      shared.work[slot.place].last = true;
      arch::barrier_arrive(arch::shared_address(&shared.slot_full[slot.place]));
    }
  }
};

}  // namespace sagebwd::cuda::sm90::fwd
