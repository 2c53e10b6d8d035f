// SPDX-License-Identifier: Apache-2.0
// The producer of the forward with block lists: one warp that fetches work, reads its list and
// starts the copies.
#pragma once

#include <cstddef>
#include <cstdint>

#include "cuda/arch/mbarrier.cuh"
#include "cuda/sm90/fwd/listed/shared.cuh"
#include "numerics/octaves.h"

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
    const int at = slot.place();
    const uint32_t full = arch::shared_address(&shared.slot_full[at]);
    if (lane == 0) {
      shared.band[at] = tile::band_of(p.mask, w.s);
      const int centres = (w.s.index * (p.h / p.group) + w.head / p.group) * kCentreRows;
      arch::barrier_expect(full, Plan::kSlotBytes);
      arch::copy_rows(arch::shared_address(&shared.slot[at]), p.q8, 0, static_cast<int>(w.row),
                      full);
      arch::copy_rows(arch::shared_address(shared.centre8[at]), p.centre8, 0, centres, full);
      arch::copy_bulk(arch::shared_address(shared.centre_scale[at]), p.centre_scale + centres,
                      sizeof(shared.centre_scale[0]), full);
      arch::copy_rows(arch::shared_address(shared.value_centres[at]), p.value_centres, 0,
                      centres / kCentreRows * D, full);
      arch::copy_bulk(arch::shared_address(shared.value_centre_scale[at]),
                      p.value_centre_scale + centres, sizeof(shared.centre_scale[0]), full);
      arch::copy_bulk(arch::shared_address(shared.logit_factor[at]), p.logit_factor + w.row,
                      sizeof(shared.logit_factor[0]), full);
    }
    __syncwarp();
  }

  /// Starts the copies of two tiles. absent: there is no second one. Its place then has the first
  /// again, and a number behind the sequence, where everything is masked.
  __device__ void load_keys(const Work& w, int first, int second, bool absent) {
    if (lane == 0) {
      const uint32_t full = arch::shared_address(&shared.stage_full[stage.place()]);
      auto& to = shared.stage[stage.place()];
      StageNumbers& numbers = shared.numbers[stage.place()];
      wait_for(shared.stage_empty, stage);
      arch::barrier_expect(full, Plan::kStageBytes);
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int tile = half == 0 || absent ? first : second;
        const uint32_t row = w.keys + static_cast<uint32_t>(tile) * kHalf;
        numbers.tile[half] = half == 1 && absent ? (w.s.nk + kHalf - 1) / kHalf : tile;
        numbers.octave[half] = numerics::octave_of_block(tile / (kBlock / kHalf));
        arch::copy_rows(arch::shared_address(to.k8[half]), p.k8, 0, static_cast<int>(row), full);
        arch::copy_rows(arch::shared_address(to.v8t[half]), p.v8t, 0,
                        static_cast<int>(row / kSlab * D), full);
        const KeyNumbers& from = p.numbers[row / kBlock];
        const auto copy = [&](float* here, const float* of_block) {
          arch::copy_bulk(arch::shared_address(here + half * kHalf), of_block + row % kBlock,
                          kHalf * sizeof(float), full);
        };
        copy(numbers.k, from.k), copy(numbers.v, from.v);
        arch::copy_bulk(arch::shared_address(&numbers.block[half]), &from.block, sizeof(from.block),
                        full);
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
