// SPDX-License-Identifier: Apache-2.0
// The shared memory of the backward and its barriers.
#pragma once

#include <cuda_fp16.h>

#include <cstdint>

#include "cuda/arch/mbarrier.cuh"
#include "cuda/arch/shared_memory.cuh"
#include "cuda/sm90/bwd/work.cuh"
#include "cuda/sm90/params.h"
#include "cuda/sm90/pipeline.cuh"

namespace sagebwd::cuda::sm90::bwd {

inline constexpr int kPlaces = 2;  // of each ring, for tiles of queries
inline constexpr int kThreads = 128 * (kConsumers + 1);

/// A tile of queries by its number on the walk; a slab likewise.
using Tile = Nth<kPlaces>;

/// All of it. Operands start at multiples of 1024 bytes, because the swizzle counts from there.
/// 16-bit operands lie in panels of 64 channels, 128 bytes a row.
template <int D>
struct SharedPlan {
  struct Front {  // of a tile of queries: what S and dP need
    alignas(1024) uint8_t q8[kQueries<D> * D];
    uint8_t do16[2 * kQueries<D> * D];
    alignas(1024) QueryStats stats[kSlabs<D>];
    alignas(16) OctaveStats octave[kSlabs<D>];  // for that of the keys
  };
  struct Back {  // what dK and dV need
    alignas(1024) uint8_t q8t[kQueries<D> * D];
    uint8_t do8t[kQueries<D> * D];
  };
  alignas(1024) uint8_t k8[kKeys * D];
  uint8_t k8t[kKeys * D];  // two slabs
  uint8_t v16[2 * kKeys * D];
  Front front[kPlaces];
  Back back[kPlaces];
  // dS as halves, [query][key], from the consumers to the warpgroup of dQ: of each slab a panel of
  // each consumer.
  static constexpr int kSlabPlaces = kPlaces * kSlabs<D>;
  using Slab = Nth<kSlabPlaces>;
  alignas(1024) uint8_t ds[kSlabPlaces][kConsumers][kSlab * 128];
  alignas(16) float v_scale[kKeys], k_scale[kKeys];
  // The largest numbers that warps find for the operand of dQ, as bits.
  alignas(16) uint32_t dq_top[kWarpgroup / 32];
  Walk walk;
  int is_last[kConsumers];  // parts.cuh

  // Barriers. Full: copies have arrived, or all consumer warps have written. Empty: the warpgroup
  // of dQ has read. Rings of tiles have no `empty`: when dS of a tile's last slab is full, both
  // consumers have left the tile's front and the back of the tile before.
  alignas(8) uint64_t keys_full;  // K8 and the scales
  uint64_t front_full[kPlaces], back_full[kPlaces];
  uint64_t ds_full[kSlabPlaces], ds_empty[kSlabPlaces];

  static constexpr uint32_t kFrontBytes =
      3 * kQueries<D> * D + sizeof(Front::stats) + sizeof(Front::octave);
  static constexpr uint32_t kBackBytes = 2 * kQueries<D> * D;
  static constexpr uint32_t kKeyBytes = sizeof(k8) + sizeof(v_scale) + sizeof(k_scale);
};

template <typename Plan>
__device__ void init_barriers(Plan& shared) {
  const auto init = [](uint64_t& barrier, int arrivals) {
    arch::barrier_init(arch::shared_address(&barrier), arrivals);
  };
  init(shared.keys_full, 1);
  for (int i = 0; i < kPlaces; ++i) init(shared.front_full[i], 1), init(shared.back_full[i], 1);
  for (uint64_t& barrier : shared.ds_full) init(barrier, 4 * kConsumers);
  for (uint64_t& barrier : shared.ds_empty) init(barrier, 4);
  arch::barrier_init_done();
}

}  // namespace sagebwd::cuda::sm90::bwd
