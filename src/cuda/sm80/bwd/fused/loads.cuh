// SPDX-License-Identifier: Apache-2.0
// What the fused backward loads: its keys once, and query tiles on their way through the ring in
// shared memory.
#pragma once

#include <cstddef>

#include "cuda/arch/scalar.cuh"
#include "cuda/sm80/bwd/fused/shared.cuh"
#include "cuda/sm80/params.h"
#include "cuda/tile/codes.cuh"
#include "cuda/tile/sequence.cuh"
#include "cuda/tile/shared_tile.cuh"

namespace sagebwd::cuda::sm80::fused_backward {

/// Starts loading the rows of V, from the caller's tensor where that is possible. `row` is the
/// first in the workspace.
template <typename T, Config kConfig>
__device__ void load_values(const Thread<kConfig>& me, const Walk& w, int64_t row) {
  constexpr int D = kConfig.d, kTileK = kConfig.tile_k();
  const bool as_is = me.p.v16 == nullptr;
  tile::load_rows<kTileK, 2 * D, kConfig.threads()>(
      me.shared + offsetof(SharedPlan<kConfig>, both.keys.v16),
      as_is ? tile::row_of<const T>(me.p.v, w.s, w.kv_head, w.s.k_begin + w.key0)
            : static_cast<const T*>(me.p.v16) + row * D,
      as_is ? me.p.v.token * 2 : D * 2, as_is ? w.s.nk - w.key0 : kTileK, me.index);
}

/// Starts loading everything of the thread block's keys.
template <typename T, Config kConfig>
__device__ void load_keys(const Thread<kConfig>& me, const Walk& w) {
  constexpr int D = kConfig.d, kTileK = kConfig.tile_k(), kThreads = kConfig.threads();
  using Plan = SharedPlan<kConfig>;
  const int64_t row = w.kv_head * me.p.tk + w.s.k_pad + w.key0;
  tile::load_tile<kTileK, D, kThreads>(me.shared + offsetof(Plan, both.keys.k8), me.p.k8 + row * D,
                                       me.index);
  load_values<T>(me, w, row);
  if (me.index < kTileK) {
    const uint32_t place = place_of_row(me.index) * 4;
    at<float>(me.shared + offsetof(Plan, k_scale) + place) = me.p.k_scale[row + me.index].scale;
    if constexpr (kConfig.has_dq_keys())
      if (me.index == 0) me.dq_key_scale() = me.p.dq_scale[row / kSlab];
    if constexpr (kConfig.has_v_codes())
      at<float>(me.shared + offsetof(Plan, v_scale) + place) =
          me.p.v_scale != nullptr ? me.p.v_scale[row + me.index] : 1.0f;
  }
  tile::load_tile<D*(kTileK / kSlab), kSlab, kThreads>(me.shared + offsetof(Plan, k8t),
                                                       me.p.k8t + row * D, me.index);
}

/// Loads query tiles, in the order of the walk. At d 64 dO comes from the caller's tensor where
/// that is possible, so the loads keep a pointer into it.
template <typename T, Config kConfig>
struct QueryLoads {
  static constexpr int D = kConfig.d, kTileQ = kConfig.tile_q(), kThreads = kConfig.threads();
  using Front = typename SharedPlan<kConfig>::Front;
  using Back = typename SharedPlan<kConfig>::Back;

  // Block lists go from head to head and back, so their dO lies in the workspace.
  static constexpr bool kInPlace = D == 64 && !kConfig.lists();
  const char* dout;     // in place: this thread's first chunk of the next tile's dO,
  int64_t dout_stride;  // and bytes from row to row

  __device__ explicit QueryLoads(const Thread<kConfig>& me) {
    dout_stride = me.p.do16 == nullptr ? me.p.dout.token * 2 : D * 2;
  }

  /// The next tiles are those of `head`, from query0 on.
  __device__ void start_head(const Thread<kConfig>& me, const tile::Sequence& s, int head,
                             int query0) {
    if constexpr (kInPlace) {
      constexpr int kChunks = 2 * D / 16;
      const uint32_t thread = arch::thread_index();
      const T* first =
          me.p.do16 == nullptr
              ? tile::row_of<const T>(me.p.dout, s, head, s.q_begin + query0)
              : static_cast<const T*>(me.p.do16) + (head * me.p.tq + s.q_pad + query0) * D;
      dout = reinterpret_cast<const char*>(first) +
             (thread / kChunks * static_cast<uint32_t>(dout_stride) + thread % kChunks * 16);
    }
  }
  /// Starts loading what S and dP read of the next tile.
  __device__ void load_front(const Thread<kConfig>& me, const Walk& w, int stage,
                             const Tile& tile) {
    const uint32_t front = me.shared + me.front_at(stage), row = tile.row;
    if constexpr (kInPlace)
      load_dout(me, w, front + offsetof(Front, do16), tile.query);
    else
      tile::load_tile<kTileQ, 2 * D, kThreads>(
          front + offsetof(Front, do16),
          static_cast<const T*>(me.p.do16) + static_cast<uint64_t>(row) * D, me.index);
    tile::load_tile<kTileQ, D, kThreads>(front + offsetof(Front, q8),
                                         me.p.q8 + static_cast<uint64_t>(row) * D, me.index);
    // Two queries to a chunk: half of the threads that are needed take exponents, half gradients.
    static_assert(offsetof(Front, gradient) == offsetof(Front, exponent) + kTileQ * 8);
    const QueryExponent* exponents = me.p.q_exponent;
    const QueryGradient* gradients = me.p.q_gradient;
    if constexpr (kConfig.has_dq_keys() && !kConfig.capped()) exponents = me.of_octave();
    if constexpr (kConfig.has_dq_keys()) gradients = me.gradients();
    const void* from = me.index < kTileQ / 2 ? static_cast<const void*>(exponents)
                                             : static_cast<const void*>(gradients);
    arch::cp_async_16_if(
        me.index < kTileQ, front + offsetof(Front, exponent) + me.index * 16,
        static_cast<const char*>(from) + row * uint64_t{8} + me.index % (kTileQ / 2) * 16);
    if constexpr (kConfig.capped())
      arch::cp_async_16_if(me.index < kTileQ / 4,
                           me.shared + me.centre_logits_at(stage) + me.index * 16,
                           me.of_octave() + row + me.index * 4);
  }
  /// Starts loading what dV and dK read of a tile; `row` is the tile's first in the workspace.
  __device__ void load_back(const Thread<kConfig>& me, int stage, uint32_t row) const {
    const uint32_t back = me.shared + me.back_at(stage);
    const uint64_t first = static_cast<uint64_t>(row) * D;
    tile::load_tile<D*(kTileQ / kSlab), kSlab, kThreads>(back + offsetof(Back, q8t),
                                                         me.p.q8t + first, me.index);
    tile::load_tile<D*(kTileQ / kSlab), kSlab, kThreads>(back + offsetof(Back, do8t),
                                                         me.p.do8t + first, me.index);
  }

 private:
  __device__ void load_dout(const Thread<kConfig>& me, const Walk& w, uint32_t to, int query0) {
    constexpr int kChunks = 2 * D / 16, kPerPass = kThreads / kChunks;
    const int row = static_cast<int>(me.index / kChunks),
              valid = me.p.do16 == nullptr ? min(w.s.nq - query0, kTileQ) : kTileQ;
    to += tile::chunk_at<2 * D>(me.index);
    if (valid == kTileQ) {
#pragma unroll
      for (int i = 0; i < kTileQ / kPerPass; ++i)
        arch::cp_async_16(to + i * kThreads * 16, dout + i * kPerPass * dout_stride);
      dout += kTileQ * dout_stride;
    } else {
#pragma unroll
      for (int i = 0; i < kTileQ / kPerPass; ++i, dout += kPerPass * dout_stride)
        arch::cp_async_16_or_zero(to + i * kThreads * 16, dout, row + i * kPerPass < valid);
    }
  }
};

}  // namespace sagebwd::cuda::sm80::fused_backward
