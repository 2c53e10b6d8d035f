// SPDX-License-Identifier: Apache-2.0
// The shared memory of the forward with block lists.
#pragma once

#include <cstddef>
#include <cstdint>

#include "cuda/arch/mbarrier.cuh"
#include "cuda/arch/shared_memory.cuh"
#include "cuda/sm90/fwd/listed/work.cuh"
#include "cuda/sm90/pipeline.cuh"

namespace sagebwd::cuda::sm90::fwd::listed {

inline constexpr int kConsumers = 2;              // warpgroups that multiply, 64 queries each
inline constexpr int kQueries = 64 * kConsumers;  // of a thread block
inline constexpr int kStages = 4;                 // stages of keys under way, two tiles each
inline constexpr int kSlots = 2;                  // pieces of work under way
inline constexpr int kThreads = 128 * (kConsumers + 1);
static_assert(kQueries == kBlock && 2 * kHalf == kBlock);

/// All of it. Operands start at multiples of 1024 bytes, because the swizzle counts from there.
template <int D>
struct SharedPlan {
  struct Slot {  // a piece of work
    alignas(1024) uint8_t q8[kQueries * D];
  };
  struct Stage {  // two tiles of keys
    alignas(1024) uint8_t k8[2][kHalf * D];
    uint8_t v8t[2][kHalf * D];  // a slab each
  };
  Slot slot[kSlots];
  Stage stage[kStages];
  alignas(16) __half v_share[kStages][2][kHalf];
  alignas(16) BlockScales scales[kStages][2];  // of the blocks that the tiles belong to
  int2 tiles[kStages];                         // which tiles of the sequence these are
  float logit_factor[kSlots][kQueries];
  float logit_top[kQueries];  // largest logit of each query, if the call wants it
  Work work[kSlots];

  // Barriers. Full: the copies have arrived. Empty: all consumers have read it.
  alignas(8) uint64_t stage_full[kStages], stage_empty[kStages];
  uint64_t slot_full[kSlots], slot_empty[kSlots];

  static constexpr uint32_t kSlotBytes = sizeof(Slot::q8);
  static constexpr uint32_t kStageBytes =
      sizeof(Stage::k8) + sizeof(Stage::v8t) + sizeof(v_share[0]) + sizeof(scales[0]);
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

}  // namespace sagebwd::cuda::sm90::fwd::listed
