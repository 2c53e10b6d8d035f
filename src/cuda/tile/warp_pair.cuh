// SPDX-License-Identifier: Apache-2.0
// Two warps that share 32 rows of scores. Each computes half of the columns, then both need all
// codes of the rows, because each owns half of the channels of the product that follows. A warp
// then reads every B fragment once for two blocks of 16 rows, which halves the traffic out of
// shared memory.
//
// What is exchanged: row statistics, then codes. Each piece has its own memory and each use is
// followed by a barrier of the pair before the other piece is touched, so neither can be
// overwritten while it is read. While there are no codes, their memory can keep a lane's own
// numbers.
#pragma once

#include <cstddef>

#include "cuda/arch/barrier.cuh"
#include "cuda/arch/shared_memory.cuh"

namespace sagebwd::cuda::tile {

inline constexpr int kRowBlocks = 2;  // of 16 rows, in a pair
inline constexpr int kPairRows = 16 * kRowBlocks;

/// Values per row: [block of 16 rows][0: row g, 1: row g + 8].
using RowValues = float[kRowBlocks][2];

/// Memory of the kPairs pairs of a thread block. Threads 64·i … 64·i + 63 are pair i.
template <int kPairs, int kCodeGroups, int kStats>
struct PairSpace {
  alignas(16) uint4 codes[kCodeGroups][64 * kPairs];             // of a thread
  alignas(16) float stats[kStats][16 * kPairs][2 * kRowBlocks];  // of four threads: their rows
};

template <int kPairs, int kCodeGroups, int kStats>
struct WarpPair {
  using Space = PairSpace<kPairs, kCodeGroups, kStats>;
  uint32_t space;  // address of Space
  uint32_t thread;

  __device__ uint32_t pair() const { return thread / 64; }
  __device__ uint32_t member() const { return thread / 32 % 2; }
  __device__ uint32_t lane() const { return thread % 32; }

  __device__ void sync() const { arch::barrier_sync(static_cast<int>(1 + pair()), 64); }

  /// One value per row; the four lanes of a row hold the same.
  __device__ void put_stat(int which, const RowValues& x) const {
    if (thread % 4 == 0) put(stat_at(which, thread), x);
  }
  /// The other warp's; after sync().
  __device__ void stat(int which, RowValues& x) const { get(stat_at(which, thread ^ 32), x); }
  /// This warp's; after a barrier.
  __device__ void my_stat(int which, RowValues& x) const { get(stat_at(which, thread), x); }

  /// Numbers of this lane, until there are codes again.
  __device__ void keep(int which, const RowValues& x) const { put(code_at(which, thread), x); }
  __device__ void kept(int which, RowValues& x) const { get(code_at(which, thread), x); }

  /// Registers of one A operand.
  __device__ void put_codes(int at, const uint32_t (&a)[4]) const {
    here<uint4>(code_at(at, thread)) = make_uint4(a[0], a[1], a[2], a[3]);
  }
  /// The other warp's.
  __device__ void codes(int at, uint32_t (&a)[4]) const {
    const uint4 v = here<uint4>(code_at(at, thread ^ 32));
    a[0] = v.x, a[1] = v.y, a[2] = v.z, a[3] = v.w;
  }

 private:
  template <typename V>
  __device__ static V& here(uint32_t address) {
    return *static_cast<V*>(arch::shared_pointer(address, alignof(V)));
  }
  __device__ uint32_t code_at(int at, uint32_t of) const {
    return space + static_cast<uint32_t>(at * sizeof(Space::codes[0])) + of * 16;
  }
  __device__ uint32_t stat_at(int which, uint32_t of) const {
    return space + static_cast<uint32_t>(offsetof(Space, stats) + which * sizeof(Space::stats[0])) +
           of / 4 * 16;
  }
  __device__ static void put(uint32_t address, const RowValues& x) {
    static_assert(kRowBlocks == 2);
    here<float4>(address) = make_float4(x[0][0], x[0][1], x[1][0], x[1][1]);
  }
  __device__ static void get(uint32_t address, RowValues& x) {
    const float4 v = here<float4>(address);
    x[0][0] = v.x, x[0][1] = v.y, x[1][0] = v.z, x[1][1] = v.w;
  }
};

}  // namespace sagebwd::cuda::tile
