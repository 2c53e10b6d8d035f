// SPDX-License-Identifier: Apache-2.0
// The shared memory of the forward: what lies where, and which part of it a lane reads.
#pragma once

#include <cstddef>
#include <cstdint>
#include <type_traits>

#include "cuda/arch/scalar.cuh"
#include "cuda/arch/shared_memory.cuh"
#include "cuda/sm80/fwd/config.cuh"
#include "cuda/sm80/fwd/work.cuh"
#include "cuda/sm80/params.h"
#include "cuda/tile/shared_tile.cuh"

namespace sagebwd::cuda::sm80::fwd {

// What a lane holds. Its queries are rows g and g + 8 of its warp's 16, where g = lane / 4; its
// keys (channels, in O) are columns 2t and 2t + 1 of each block of 8, where t = lane % 4. Elements
// 0 and 1 of a block are of row g, elements 2 and 3 of row g + 8.
template <Config kConfig>
using Scores = float[kConfig.key_blocks()][4];
template <Config kConfig>
using Codes = uint32_t[kConfig.key_steps()][4];  // A operands
using PerRow = float[2];

struct None {};

/// The folded scales of a tile (FoldedScales).
template <Config kConfig>
struct TileFolded {
  float exponent[kConfig.tile_k], inverse[kConfig.tile_k];
};

/// What the warps of a thread block share.
template <Config kConfig>
struct SharedPlan {
  static constexpr int D = kConfig.d, kTileK = kConfig.tile_k;
  static_assert(kConfig.valid());
  struct Stage {  // a tile of keys
    alignas(128) uint8_t k8[kTileK * D];
    alignas(128) uint8_t v8t[kTileK * D];
    alignas(16) KeyScale k_scale[kTileK];
    alignas(16) std::conditional_t<kConfig.folds_v(), TileFolded<kConfig>, None> folded;
    alignas(16) float v_scale;  // ForwardParams::v_tile_scale
  };
  Stage stage[2];  // a tile of V in 16 bit takes the place of k8 and v8t
  alignas(16) Work<kConfig> work;
  float logit_top[kConfig.queries()];  // largest logit of each query, if the call wants it
  // The part of each row sum over keys of octaves that the walk has left; not in `paper`. The loop
  // has no registers for it.
  float sum_before[kConfig.queries()];
  int any_poisoned;  // whether the V of a tile that has been multiplied holds NaN or Inf
};

/// The two stages take turns.
__device__ inline int other(int stage) { return stage ^ 1; }

/// What lies at an address in shared memory.
template <typename V>
__device__ V& at(uint32_t address) {
  return *static_cast<V*>(arch::shared_pointer(address, alignof(V)));
}

/// Who a thread is, what it was given, and where it finds things.
template <Config kConfig>
struct Thread {
  using Plan = SharedPlan<kConfig>;
  using Stage = typename Plan::Stage;
  static constexpr int D = kConfig.d;

  const ForwardParams& p;
  uint32_t shared;                    // address of the SharedPlan
  uint32_t index;                     // in the thread block
  uint32_t key_offset, value_offset;  // the lane's part of fragment addresses of K8 and V8ᵀ

  __device__ Thread(const ForwardParams& params, uint8_t* memory)
      : p(params), shared(arch::shared_address(memory)) {
    // A shuffle, because the compiler would read the slow special register again and again.
    set_index(__shfl_sync(0xffffffffu, threadIdx.x, static_cast<int>(threadIdx.x % 32)));
    arch::keep(key_offset), arch::keep(value_offset), arch::keep(shared);
  }

  /// Sets the thread's number and what follows from it.
  __device__ void set_index(uint32_t number) {
    index = number;
    key_offset = tile::b_lane<D>(lane());
    value_offset = tile::swizzled<kSlab>(lane() & 7, lane() >> 3);
  }

  __device__ uint32_t lane() const { return index % 32; }
  __device__ uint32_t t() const { return index % 4; }
  /// The first of this lane's two queries, among those of the thread block.
  __device__ int first_row() const { return static_cast<int>(index / 32 * 16 + lane() / 4); }

  // From here on: behind the first barrier, when the Work is there.
  __device__ const Work<kConfig>& work() const {
    return at<Work<kConfig>>(shared + offsetof(Plan, work));
  }
  /// Query r of this lane, inside the sequence.
  __device__ int query(int r) const { return work().q0 + first_row() + 8 * r; }
  /// The first key of that query's band. It may lie outside the sequence.
  __device__ int band_of(int r) const { return query(r) + work().band.begin; }
  /// Keys that the query sees, from there on.
  __device__ uint32_t seen(int r) const {
    const Work<kConfig>& w = work();
    return query(r) < w.s.nq ? static_cast<uint32_t>(min(static_cast<int>(w.band.width()),
                                                         max(w.s.nk - band_of(r), 0)))
                             : 0;
  }
  /// The first key of a tile, in the workspace.
  __device__ uint32_t key_row(int tile) const {
    return work().keys + static_cast<uint32_t>(tile) * kConfig.tile_k;
  }

  __device__ uint32_t stage_at(int stage) const {
    return shared + static_cast<uint32_t>(stage * sizeof(Stage));
  }
  __device__ float v_scale(int stage) const {
    return at<float>(stage_at(stage) + offsetof(Stage, v_scale));
  }
  /// Whether the V of a tile holds NaN or Inf.
  __device__ bool poisoned(int stage) const {
    const float scale = v_scale(stage);
    return scale != scale;
  }
  __device__ float& logit_top(int r) const {
    return at<float>(shared + offsetof(Plan, logit_top) + (first_row() + 8 * r) * 4);
  }
  /// One lane of the row writes it.
  __device__ float& sum_before(int r) const {
    return at<float>(shared + offsetof(Plan, sum_before) + (first_row() + 8 * r) * 4);
  }
  __device__ int& any_poisoned() const { return at<int>(shared + offsetof(Plan, any_poisoned)); }
};

}  // namespace sagebwd::cuda::sm80::fwd
