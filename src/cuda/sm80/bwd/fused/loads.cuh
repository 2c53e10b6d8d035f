// SPDX-License-Identifier: Apache-2.0
// What the fused backward loads: its keys once, and query tiles on their way through the ring in
// shared memory.
#pragma once

#include <cstddef>

#include "cuda/arch/scalar.cuh"
#include "cuda/sm80/bwd/fused/products.cuh"
#include "cuda/sm80/params.h"
#include "cuda/tile/sequence.cuh"
#include "cuda/tile/shared_tile.cuh"

namespace sagebwd::cuda::sm80 {

template <typename T, class Shape>
struct FusedLoads : FusedProducts<T, Shape> {
  using Lane = FusedProducts<T, Shape>;
  using Lane::p, Lane::base, Lane::thread, Lane::row_at, Lane::front_at, Lane::back_at;
  using typename Lane::Shared, typename Lane::Front, typename Lane::Back;
  static constexpr int D = Shape::D, kTileQ = Shape::kTileQ, kTileK = Shape::kTileK;
  static constexpr int kThreads = Shape::kThreads;

  const char* dout;     // d 64: this thread's first chunk of dO of the next tile to load,
  int64_t dout_stride;  // and bytes from row to row

  __device__ FusedLoads(const BackwardParams& params, uint8_t* shared) : Lane(params, shared) {
    dout_stride = p.do16 == nullptr ? p.dout.token * 2 : D * 2;
  }
  template <typename V>
  __device__ V& at(uint32_t address) const {
    return Lane::template at<V>(address);
  }

  /// Starts loading the keys; `row` is the first in the workspace.
  __device__ void load_keys(const FusedWork& w, int64_t row) const {
    tile::load_tile<kTileK, D, kThreads>(base + offsetof(Shared, both.keys.k8), p.k8 + row * D,
                                         thread);
    load_values(w, row);
    if (thread < kTileK)
      at<float>(base + offsetof(Shared, k_scale) + row_at(thread) * 4) =
          p.k_scale[row + thread].scale;
    tile::load_tile<D*(kTileK / kGroup), kGroup, kThreads>(base + offsetof(Shared, k8t),
                                                           p.k8t + row * D, thread);
  }
  /// Rows of V, from the caller's tensor where that is possible; `row` is the first in the
  /// workspace.
  __device__ void load_values(const FusedWork& w, int64_t row) const {
    const bool as_is = p.v16 == nullptr;
    tile::load_rows<kTileK, 2 * D, kThreads>(
        base + offsetof(Shared, both.keys.v16),
        as_is ? tile::row_of<const T>(p.v, w.s, w.kv_head, w.s.k_begin + w.key0)
              : static_cast<const T*>(p.v16) + row * D,
        as_is ? p.v.token * 2 : D * 2, as_is ? w.s.nk - w.key0 : kTileK, thread);
  }

  /// The tiles to load are those of `head` from query0 on. At d 64 dO is read from the caller's
  /// tensor where that is possible.
  __device__ void start_head(const tile::Sequence& s, int head, int query0) {
    if constexpr (D == 64) {
      constexpr int kChunks = 2 * D / 16;
      const uint32_t thread = arch::thread_index();
      const T* first = p.do16 == nullptr
                           ? tile::row_of<const T>(p.dout, s, head, s.q_begin + query0)
                           : static_cast<const T*>(p.do16) + (head * p.tq + s.q_pad + query0) * D;
      dout = reinterpret_cast<const char*>(first) +
             (thread / kChunks * static_cast<uint32_t>(dout_stride) + thread % kChunks * 16);
    }
  }

  /// Starts loading the next tile of queries; `row` is its first in the workspace.
  __device__ void load_front(const FusedWork& w, int stage, uint32_t row, int query0) {
    const uint32_t front = base + front_at(stage);
    if constexpr (D == 64)
      load_dout(w, front + offsetof(Front, do16), query0);
    else
      tile::load_tile<kTileQ, 2 * D, kThreads>(
          front + offsetof(Front, do16),
          static_cast<const T*>(p.do16) + static_cast<uint64_t>(row) * D, thread);
    tile::load_tile<kTileQ, D, kThreads>(front + offsetof(Front, q8),
                                         p.q8 + static_cast<uint64_t>(row) * D, thread);
    // Two queries to a chunk: half of the threads that are needed take exponents, half gradients.
    static_assert(offsetof(Front, gradient) == offsetof(Front, exponent) + kTileQ * 8);
    const void* from = thread < kTileQ / 2 ? static_cast<const void*>(p.q_exponent)
                                           : static_cast<const void*>(p.q_gradient);
    arch::cp_async_16_if(
        thread < kTileQ, front + offsetof(Front, exponent) + thread * 16,
        static_cast<const char*>(from) + row * uint64_t{8} + thread % (kTileQ / 2) * 16);
  }
  __device__ void load_back(int stage, uint32_t row) const {
    const uint32_t back = base + back_at(stage);
    const uint64_t first = static_cast<uint64_t>(row) * D;
    tile::load_tile<D*(kTileQ / kGroup), kGroup, kThreads>(back + offsetof(Back, q8t),
                                                           p.q8t + first, thread);
    tile::load_tile<D*(kTileQ / kGroup), kGroup, kThreads>(back + offsetof(Back, do8t),
                                                           p.do8t + first, thread);
  }

  __device__ void load_dout(const FusedWork& w, uint32_t to, int query0) {
    constexpr int kChunks = 2 * D / 16, kPerPass = kThreads / kChunks;
    const int row = static_cast<int>(thread / kChunks),
              valid = p.do16 == nullptr ? min(w.s.nq - query0, kTileQ) : kTileQ;
    to += tile::chunk_at<2 * D>(thread);
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

}  // namespace sagebwd::cuda::sm80
