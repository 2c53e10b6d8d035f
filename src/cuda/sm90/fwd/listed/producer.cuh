// SPDX-License-Identifier: Apache-2.0
// The producer of the forward with block lists: one warp that fetches work, reads its list and
// starts the copies.
#pragma once

#include <cstddef>
#include <cstdint>

#include "cuda/arch/mbarrier.cuh"
#include "cuda/sm90/fwd/listed/shared.cuh"

namespace sagebwd::cuda::sm90::fwd::listed {

template <int D>
struct Producer {
  using Plan = SharedPlan<D>;

  const ListedParams& p;
  Plan& shared;
  uint32_t lane;
  Ring<kStages> stage{1};  // the first round finds everything empty
  Ring<kSlots> slot{1};

  /// Puts the next piece of work into the slot. Returns false when there is none left.
  __device__ bool fetch() {
    const uint32_t all = static_cast<uint32_t>(p.q_blocks) * static_cast<uint32_t>(p.h);
    wait_for(shared.slot_empty, slot);
    for (;;) {
      uint32_t index = 0;
      if (lane == 0) index = atomicAdd(p.next, 1u);
      index = __shfl_sync(0xffffffffu, index, 0);
      if (index >= all) return false;
      Work w;
      if (!work_at(w, p, index)) continue;
      if (lane == 0) shared.work[slot.place()] = w;
      __syncwarp();
      return true;
    }
  }

  __device__ void load_queries(const Work& w) {
    const uint32_t full = arch::shared_address(&shared.slot_full[slot.place()]);
#pragma unroll
    for (int i = 0; i < kQueries / 32; ++i) {
      const int at = i * 32 + static_cast<int>(lane);
      shared.logit_factor[slot.place()][at] = p.logit_factor[static_cast<uint64_t>(w.row) + at];
    }
    __syncwarp();
    if (lane == 0) {
      arch::barrier_expect(full, Plan::kSlotBytes);
      arch::copy_rows(arch::shared_address(&shared.slot[slot.place()]), p.q8, 0,
                      static_cast<int>(w.row), full);
    }
  }

  /// Starts the copies of two tiles. absent: there is no second one. Its place then has the first
  /// again, and a number behind the sequence, where everything is masked.
  __device__ void load_keys(const Work& w, int first, int second, bool absent) {
    if (lane == 0) {
      const uint32_t full = arch::shared_address(&shared.stage_full[stage.place()]);
      auto& to = shared.stage[stage.place()];
      wait_for(shared.stage_empty, stage);
      shared.tiles[stage.place()] = {first, absent ? (w.s.nk + kHalf - 1) / kHalf : second};
      arch::barrier_expect(full, Plan::kStageBytes);
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int tile = half == 0 || absent ? first : second;
        const uint32_t row = w.keys + static_cast<uint32_t>(tile) * kHalf;
        arch::copy_rows(arch::shared_address(to.k8[half]), p.k8, 0, static_cast<int>(row), full);
        arch::copy_rows(arch::shared_address(to.v8t[half]), p.v8t, 0,
                        static_cast<int>(row / kSlab * D), full);
        arch::copy_bulk(arch::shared_address(shared.v_share[stage.place()][half]), p.v_share + row,
                        sizeof(shared.v_share[0][0]), full);
        arch::copy_bulk(arch::shared_address(&shared.scales[stage.place()][half]),
                        p.scales + row / kBlock, sizeof(BlockScales), full);
      }
    }
    stage.advance();
  }

  /// All stages of a piece. The warp reads 32 entries of the list at once.
  __device__ void load_list(const Work& w) {
    const int32_t* const entries = entries_of(w, p);
    const int count = w.entries;
    for (int from = 0; from < count; from += 32) {
      const int end = min(32, count - from),
                mine = static_cast<int>(lane) < end ? entries[from + static_cast<int>(lane)] : 0;
      for (int i = 0; i < end; ++i) {
        const int entry = __shfl_sync(0xffffffffu, mine, i);
        if (p.whole_stages) {
          load_keys(w, 2 * entry, 2 * entry + 1, false);
          continue;
        }
        ++i;
        load_keys(w, entry, __shfl_sync(0xffffffffu, mine, i % 32), i == end);
      }
    }
  }

  __device__ void run() {
    for (; fetch(); slot.advance()) {
      load_queries(shared.work[slot.place()]);
      load_list(shared.work[slot.place()]);
    }
    if (lane == 0) {
      shared.work[slot.place()].last = true;
      arrive_at(shared.slot_full, slot);
    }
  }
};

}  // namespace sagebwd::cuda::sm90::fwd::listed
