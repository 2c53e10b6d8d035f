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

#include "cuda/arch/barrier.cuh"

namespace sagebwd::cuda::tile {

inline constexpr int kRowBlocks = 2;  // of 16 rows, in a pair
inline constexpr int kPairRows = 16 * kRowBlocks;

/// Values per row: [block of 16 rows][0: row g, 1: row g + 8].
using RowValues = float[kRowBlocks][2];

/// Memory of the kPairs pairs of a thread block.
template <int kPairs, int kCodeGroups, int kStats>
struct PairSpace {
  // [pair][member][…]
  alignas(16) uint4 codes[kPairs][2][kCodeGroups][32];
  alignas(16) float stats[kPairs][2][kStats][8][2 * kRowBlocks];  // a lane's rows lie together
};

template <int kPairs, int kCodeGroups, int kStats>
struct WarpPair {
  PairSpace<kPairs, kCodeGroups, kStats>& space;
  uint32_t pair, member, lane;

  __device__ explicit WarpPair(PairSpace<kPairs, kCodeGroups, kStats>& s)
      : space(s), pair(threadIdx.x / 64), member(threadIdx.x / 32 % 2), lane(threadIdx.x % 32) {}

  __device__ void sync() const { arch::barrier_sync(static_cast<int>(1 + pair), 64); }

  /// One value per row; the four lanes of a row hold the same.
  __device__ void put_stat(int which, const RowValues& value) const {
    if (lane % 4 != 0) return;
#pragma unroll
    for (int m = 0; m < kRowBlocks; ++m)
#pragma unroll
      for (int r = 0; r < 2; ++r)
        space.stats[pair][member][which][lane / 4][2 * m + r] = value[m][r];
  }
  /// The other warp's; after sync().
  __device__ float stat(int which, int m, int r) const {
    return space.stats[pair][member ^ 1][which][lane / 4][2 * m + r];
  }
  /// This warp's; after a barrier.
  __device__ float my_stat(int which, int m, int r) const {
    return space.stats[pair][member][which][lane / 4][2 * m + r];
  }

  /// Numbers of this lane, until there are codes again.
  __device__ void keep(int which, const RowValues& x) const {
    static_assert(kRowBlocks == 2);
    space.codes[pair][member][which][lane] =
        make_uint4(__float_as_uint(x[0][0]), __float_as_uint(x[0][1]), __float_as_uint(x[1][0]),
                   __float_as_uint(x[1][1]));
  }
  __device__ void kept(int which, RowValues& x) const {
    const uint4 v = space.codes[pair][member][which][lane];
    x[0][0] = __uint_as_float(v.x), x[0][1] = __uint_as_float(v.y);
    x[1][0] = __uint_as_float(v.z), x[1][1] = __uint_as_float(v.w);
  }

  /// Registers of one A operand.
  __device__ void put_codes(int at, const uint32_t (&a)[4]) const {
    space.codes[pair][member][at][lane] = make_uint4(a[0], a[1], a[2], a[3]);
  }
  __device__ void codes(int at, uint32_t (&a)[4]) const {
    const uint4 v = space.codes[pair][member ^ 1][at][lane];
    a[0] = v.x, a[1] = v.y, a[2] = v.z, a[3] = v.w;
  }
};

}  // namespace sagebwd::cuda::tile
