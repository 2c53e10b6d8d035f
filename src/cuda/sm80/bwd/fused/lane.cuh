// SPDX-License-Identifier: Apache-2.0
// What a lane of the fused backward holds, and where the thread block's shared memory has things.
#pragma once

#include <cstddef>

#include "cuda/arch/shared_memory.cuh"
#include "cuda/sm80/bwd/fused/shape.cuh"

namespace sagebwd::cuda::sm80 {

template <class Shape>
struct FusedLane {
  using Shared = FusedShared<Shape>;
  static constexpr int kM = Shape::kM, kQueryBlocks = Shape::kQueryBlocks;
  using Scores = float[kM][kQueryBlocks][4];
  using Rows = float[kM][2];  // [block of 16 keys][0: row g, 1: row g + 8]
  static_assert(kM == 2 && kQueryBlocks == 4);

  uint32_t base;  // address of Shared
  uint32_t thread;

  __device__ explicit FusedLane(uint8_t* shared) : base(arch::shared_address(shared)) {
    // By way of shuffles, or the compiler would ask for slow special registers again and again.
    thread = __shfl_sync(0xffffffffu, threadIdx.x, static_cast<int>(threadIdx.x % 32));
    base = __shfl_sync(0xffffffffu, base, 0);
  }

  template <typename V>
  __device__ V& at(uint32_t address) const {
    return *static_cast<V*>(arch::shared_pointer(address, alignof(V)));
  }

  __device__ uint32_t warp() const { return thread / 32; }
  __device__ uint32_t lane() const { return thread % 32; }
  __device__ uint32_t t() const { return thread % 4; }
  __device__ uint32_t group() const { return warp() / Shape::kShare; }
  __device__ uint32_t member() const { return warp() % Shape::kShare; }
  __device__ uint32_t my_queries() const { return member() * Shape::kMyQueries; }
  __device__ int my_row(int m, int r) const {
    return static_cast<int>(group() * 16 * kM + lane() / 4) + 16 * m + 8 * r;
  }
  /// Where the number of a key or query lies: the four of 32 that are 8 apart lie together, as a
  /// lane needs them.
  __device__ static uint32_t row_at(uint32_t row) {
    return (row & ~31u) + (row & 7) * 4 + (row >> 3 & 3);
  }
  /// Numbers of this lane's keys. Read anew in every round: registers are scarcer than loads.
  __device__ void get_rows(Rows& x, uint32_t from) const { get_four(x, rows_of(from)); }
  __device__ uint32_t rows_of(uint32_t from) const {
    return from + group() * 128 + lane() / 4 * 16;
  }
  __device__ void get_four(Rows& x, uint32_t from) const {
    const float4 v = at<float4>(from);
    x[0][0] = v.x, x[0][1] = v.y, x[1][0] = v.z, x[1][1] = v.w;
  }
  __device__ void key_scales(Rows& scale) const {
    get_rows(scale, base + offsetof(Shared, k_scale));
  }

  /// Behind the first barrier.
  __device__ const FusedWork& work() const { return at<FusedWork>(base + offsetof(Shared, work)); }

  // Where things are.
  using Front = typename Shared::Front;
  using Back = typename Shared::Back;
  __device__ static constexpr uint32_t front_at(int stage) {
    return static_cast<uint32_t>(offsetof(Shared, front) +
                                 (Shape::kFronts > 1 ? stage * sizeof(Front) : 0));
  }
  __device__ static constexpr uint32_t back_at(int stage) {
    return static_cast<uint32_t>(offsetof(Shared, back) + stage * sizeof(Back));
  }
  __device__ uint32_t maxima_at(int buffer) const {
    return base + static_cast<uint32_t>(offsetof(Shared, maxima) +
                                        buffer * sizeof(typename Shared::Maxima));
  }
  __device__ uint32_t tile_scales_at(int buffer) const {
    return base + static_cast<uint32_t>(offsetof(Shared, tile_scales) + buffer * 32);
  }
  static constexpr uint32_t kP = offsetof(typename Shared::Maxima, p),
                            kDs = offsetof(typename Shared::Maxima, ds),
                            kQuery = offsetof(typename Shared::Maxima, query);
  static constexpr uint32_t kPCodes = offsetof(Shared, both.codes.p),
                            kDsCodes = offsetof(Shared, both.codes.ds);

  // Codes as A operands, 512 bytes each. The warps of a group have a contraction step of 32 queries
  // each; for dQ, `pair` are two blocks j of 16 queries, and a group of keys is a step.
  __device__ uint32_t operand_at(uint32_t codes, uint32_t step, int m) const {
    return base + codes + (m * Shape::kWarps + group() * Shape::kShare + step) * 512;
  }
  __device__ uint32_t query_codes_at(uint32_t pair, int j, int step) const {
    return base + static_cast<uint32_t>(offsetof(Shared, both.codes.query)) +
           (j * Shape::kWarps + step * Shape::kShare + pair) * 512;
  }
  __device__ void get_codes(uint32_t (&a)[4], uint32_t operand) const {
    const uint4 v = at<uint4>(operand + lane() * 16);
    a[0] = v.x, a[1] = v.y, a[2] = v.z, a[3] = v.w;
  }
};

}  // namespace sagebwd::cuda::sm80
