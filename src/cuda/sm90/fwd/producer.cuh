// SPDX-License-Identifier: Apache-2.0
// The producer: one warp that fetches work and starts the copies of queries and keys.
#pragma once

#include <climits>
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
  uint32_t number = 0;  // of the next piece of work; lane 0 has it

  /// Takes the next number. The answer is not waited for until it is needed.
  __device__ void take_number() {
    if (lane == 0) number = atomicAdd(p.next, 1u);
  }

  /// The piece of work with the number that was taken, or a later one, in its slot. Returns false
  /// when there is none left.
  __device__ bool fetch() {
    const uint32_t all = Numbers(p).of_all_heads(p);
    wait_for(shared.slot_empty, slot);
    for (;; take_number()) {
      int found = 0;  // 1: a piece, -1: no more numbers
      if (lane == 0) found = number >= all ? -1 : work_at(shared.work[slot.place()], p, number);
      __syncwarp();  // the others see what lane 0 has written
      found = __shfl_sync(0xffffffffu, found, 0);
      if (found != 0) return found > 0;
    }
  }

  __device__ void load_queries(const Work& w) {
    const uint32_t full = arch::shared_address(&shared.slot_full[slot.place()]);
    // Behind the last row of all nothing is copied: whatever the queries there have, nobody sees.
    const int rows = min(kQueries, static_cast<int>(p.h * p.tq - w.row));
    const uint32_t row_bytes = static_cast<uint32_t>(rows) * sizeof(float);
    if (lane < kConsumers) {
      shared.seen[slot.place()][lane] = seen_by(w, p.mask, static_cast<int>(lane));
      const tile::Band band = tile::band_of(p.mask, w.s);
      const int last = w.q0 + static_cast<int>(lane) * 64 + 63;
      shared.last_look[slot.place()][lane] = p.max_logit != nullptr ? INT_MAX
                                             : p.mask.left >= 0 ? max(last + band.begin, 0) / kKeys
                                                                : -1;
      if (lane == 0) shared.band[slot.place()] = band;
    }
    __syncwarp();
    if (lane == 0) {
      arch::barrier_expect(full, Plan::kSlotBytes + row_bytes);
      arch::copy_rows(arch::shared_address(&shared.slot[slot.place()]), p.q8, 0,
                      static_cast<int>(w.row), full);
      const auto copy = [&](float* to, const float* from, uint32_t bytes) {
        arch::copy_bulk(arch::shared_address(to), from, bytes, full);
      };
      copy(shared.logit_factor[slot.place()], p.logit_factor + w.row, row_bytes);
      const int centres = (w.s.index * (p.h / p.group) + w.head / p.group) * kCentreRows;
      arch::copy_rows(arch::shared_address(shared.centre8[slot.place()]), p.centre8, 0, centres,
                      full);
      copy(shared.centre_scale[slot.place()], p.centre_scale + centres,
           sizeof(shared.centre_scale[0]));
      arch::copy_rows(arch::shared_address(shared.value_centres[slot.place()]), p.value_centres, 0,
                      centres / kCentreRows * D, full);
      copy(shared.value_centre_scale[slot.place()], p.value_centre_scale + centres,
           sizeof(shared.centre_scale[0]));
    }
  }

  __device__ void load_keys(uint32_t keys, int tile) {
    if (lane == 0) {
      const uint32_t full = arch::shared_address(&shared.stage_full[stage.place()]),
                     to = arch::shared_address(&shared.stage[stage.place()]),
                     row = keys + static_cast<uint32_t>(tile) * kKeys;
      wait_for(shared.stage_empty, stage);
      arch::barrier_expect(full, Plan::kStageBytes);
      arch::copy_rows(to, p.k8, 0, static_cast<int>(row), full);
      arch::copy_rows(to + kKeys * D, p.v8t, 0, static_cast<int>(row / kSlab * D), full);
      arch::copy_bulk(arch::shared_address(&shared.keys[stage.place()]), p.numbers + row / kKeys,
                      sizeof(KeyNumbers), full);
    }
    stage.advance();
  }

  __device__ void run() {
    take_number();
    for (; fetch(); slot.advance()) {
      const Work& w = shared.work[slot.place()];
      load_queries(w);
      const uint32_t keys = w.keys;
      const int first = w.walk.first, end = first + w.walk.steps;
      for (int tile = first; tile < end - 1; ++tile) load_keys(keys, tile);
      // Before the last tile waits for its stage, and no earlier: another thread block might be
      // free sooner.
      take_number();
      if (first < end) load_keys(keys, end - 1);
    }
    if (lane == 0) {
      shared.work[slot.place()].last = true;
      arrive_at(shared.slot_full, slot);
    }
  }
};

}  // namespace sagebwd::cuda::sm90::fwd
