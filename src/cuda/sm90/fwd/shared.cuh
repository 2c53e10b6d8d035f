// SPDX-License-Identifier: Apache-2.0
// The shared memory of the forward, its barriers, and who a thread is.
#pragma once

#include <cstddef>
#include <cstdint>

#include "cuda/arch/mbarrier.cuh"
#include "cuda/arch/shared_memory.cuh"
#include "cuda/sm90/fwd/work.cuh"
#include "cuda/sm90/params.h"
#include "cuda/sm90/pipeline.cuh"

namespace sagebwd::cuda::sm90::fwd {

inline constexpr int kConsumers = 3;              // warpgroups that multiply, 64 queries each
inline constexpr int kQueries = 64 * kConsumers;  // of a thread block
inline constexpr int kKeys = 128;                 // of a tile
inline constexpr int kStages = 3;                 // tiles of keys under way
inline constexpr int kSlots = 2;                  // pieces of work under way
inline constexpr int kThreads = 128 * (kConsumers + 1);
static_assert(kKeys == kBlock);

/// All of it. Operands start at multiples of 1024 bytes, because the swizzle counts from there.
template <int D>
struct SharedPlan {
  struct Slot {  // a piece of work
    alignas(1024) uint8_t q8[kQueries * D];
  };
  struct Stage {  // a tile of keys
    alignas(1024) uint8_t k8[kKeys * D];
    uint8_t v8t[kKeys * D];  // two slabs
  };
  Slot slot[kSlots];
  Stage stage[kStages];
  alignas(1024) uint8_t centre8[kSlots][kCentreRows * D];            // swizzled
  alignas(1024) uint8_t value_centres[kSlots][kCentreRows * 2 * D];  // bf16, a row per channel
  alignas(16) float centre_scale[kSlots][kCentreRows], value_centre_scale[kSlots][kCentreRows];
  alignas(16) KeyNumbers keys[kStages];
  tile::Band band[kSlots];
  // The last tile whose logits a consumer looks at before their exponentials: all if the call wants
  // the largest logits; with a window that in which its last query sees its first key; else -1.
  int last_look[kSlots][kConsumers];
  // Of each octave and query; behind an octave the row sum up to its end takes the place.
  float centre_logit[kCentreRows][kQueries];
  // In tiles that the mask cuts: the largest scale of V up to a key, which each warp finds for
  // itself, and up to the last key that a query sees.
  alignas(16) float value_prefix[4 * kConsumers][kKeys];
  float value_top[kQueries];
  float reference[kQueries];  // of the rows, which have no registers left for it
  alignas(16) float logit_factor[kSlots][kQueries];
  float logit_top[kQueries];  // largest logit of each query, if the call wants it
  Work work[kSlots];
  Seen seen[kSlots][kConsumers];

  // Barriers. Full: the copies have arrived. Empty: all consumers have read it.
  alignas(8) uint64_t stage_full[kStages], stage_empty[kStages];
  uint64_t slot_full[kSlots], slot_empty[kSlots];

  // And those of its rows.
  static constexpr uint32_t kSlotBytes = sizeof(Slot::q8) + sizeof(centre8[0]) +
                                         sizeof(value_centres[0]) + 2 * sizeof(centre_scale[0]);
  static constexpr uint32_t kStageBytes =
      sizeof(Stage::k8) + sizeof(Stage::v8t) + sizeof(KeyNumbers);
};

template <typename Plan>
__device__ void init_barriers(Plan& shared) {
  for (int i = 0; i < kStages; ++i) {
    arch::barrier_init(arch::shared_address(&shared.stage_full[i]), 1);
    arch::barrier_init(arch::shared_address(&shared.stage_empty[i]), 4 * kConsumers);
  }
  for (int i = 0; i < kSlots; ++i) {
    arch::barrier_init(arch::shared_address(&shared.slot_full[i]), 1);
    arch::barrier_init(arch::shared_address(&shared.slot_empty[i]), 4 * kConsumers);
  }
  arch::barrier_init_done();
}

}  // namespace sagebwd::cuda::sm90::fwd
