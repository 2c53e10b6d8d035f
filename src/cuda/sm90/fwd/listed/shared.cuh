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

/// What a stage has beside its operands.
struct StageNumbers {
  // Of the keys of both tiles, as in KeyNumbers.
  alignas(16) float k[2 * kHalf], v[2 * kHalf];
  KeyNumbers::OfBlock block[2];  // that the tiles belong to; alone who is poisoned counts
  // Which tiles of the sequence these are, and the octaves of their keys. A tile that is missing
  // lies behind the sequence, in the octave of the other.
  int tile[2], octave[2];
};

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
  alignas(1024) uint8_t centre8[kSlots][kCentreRows * D];            // swizzled
  alignas(1024) uint8_t value_centres[kSlots][kCentreRows * 2 * D];  // bf16, a row per channel
  alignas(16) float centre_scale[kSlots][kCentreRows], value_centre_scale[kSlots][kCentreRows];
  StageNumbers numbers[kStages];
  alignas(16) float logit_factor[kSlots][kQueries];
  tile::Band band[kSlots];
  // Of each octave and query: the logit of the centre, and the sum of P.
  float centre_logit[kCentreRows][kQueries], octave_sum[kMostOctaves][kQueries];
  float counted[kQueries];             // the part of a query's row sum that is in them
  int counted_octave[4 * kConsumers];  // of each warp: the octave of what is not
  // Of each warp, in a stage: where the mask cuts it the largest scale of V up to a key of a tile,
  // else the keys' shares of V.
  union {
    alignas(16) float value_prefix[2 * kHalf];
    alignas(16) __half share[2 * kHalf];
  } of_warp[4 * kConsumers];
  float value_top[kQueries];  // the largest scale of V that a query sees of a stage
  float reference[kQueries];
  float logit_top[kQueries];  // largest logit of each query, if the call wants it
  Work work[kSlots];

  // Barriers. Full: the copies have arrived. Empty: all consumers have read it.
  alignas(8) uint64_t stage_full[kStages], stage_empty[kStages];
  uint64_t slot_full[kSlots], slot_empty[kSlots];

  static constexpr uint32_t kSlotBytes = sizeof(Slot::q8) + sizeof(centre8[0]) +
                                         sizeof(value_centres[0]) + 2 * sizeof(centre_scale[0]) +
                                         sizeof(logit_factor[0]);
  static constexpr uint32_t kStageBytes = sizeof(Stage) + sizeof(StageNumbers::k) +
                                          sizeof(StageNumbers::v) + sizeof(StageNumbers::block);
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
