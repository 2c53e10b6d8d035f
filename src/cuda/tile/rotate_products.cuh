// SPDX-License-Identifier: Apache-2.0
// The rotation of numerics/rotate.h on tensor cores, for rows of 16-bit numbers that four lanes
// hold as in tile/rotate.cuh: eight channels of every 32 each. Channel 8·i + e is place e of chunk
// i, and the Hadamard matrix of D channels is that of D/8 chunks times that of eight places. Tensor
// cores do the former: their operand has the tokens of a warp as rows and chunks as columns, and
// their result has the same layout, so nothing moves between lanes. Sums of the latter stay in a
// thread.
//
// Products with ±1 are exact. Sums are FP32, in an order that the hardware chooses, so results
// differ from those of numerics::rotate in last bits.
#pragma once

#include <cuda_bf16.h>

#include <cstdint>
#include <type_traits>

#include "cuda/arch/mma_sync.cuh"
#include "cuda/arch/scalar.cuh"
#include "cuda/tile/rotate.cuh"

namespace sagebwd::cuda::tile {

/// The Hadamard matrix of D/8 chunks as the B operand of a lane.
template <typename T, int D>
struct ChunkMixer {
  static constexpr int kParts = D / 32;
  static_assert(D == 64 || D == 128, "4 or 8 pairs of chunks");
  uint32_t b;  // of chunks 0 … 7, for results of chunks 0 … 7

  /// `lane`: of the warp, 4·slot + member.
  __device__ explicit ChunkMixer(uint32_t lane) {
    // Column n of the result goes to member n/2: its part n % 2. Rows of this operand are chunks in
    // the same order, because a register of A holds parts 0 and 1 of its lane.
    const uint32_t member = lane % 4, column = lane / 4;
    const uint32_t result = column / 2 + column % 2 * 4;
    const uint32_t one = std::is_same_v<T, __nv_bfloat16> ? 0x3f80u : 0x3c00u;
    const uint32_t low = __popc(member & result) & 1u, high = __popc((member + 4) & result) & 1u;
    b = one | one << 16 | low << 15 | high << 31;
  }

  /// Place e of the lane's chunks of two tokens, mixed, plus what y holds: y[step][part].
  /// `word`: the two numbers from place e & ~1 on of chunk [part][step].
  __device__ __forceinline__ void mix(float (&y)[2][kParts], const uint32_t (&word)[kParts][2],
                                      int e) const {
    const uint32_t half = e % 2 == 0 ? 0x5410u : 0x7632u;
    const auto pair = [&](int part, int step) {
      return arch::byte_permute(word[part][step], word[part + 1][step], half);
    };
    if constexpr (D == 64) {
      float d[4] = {y[0][0], y[0][1], y[1][0], y[1][1]};
      arch::mma_16_half_depth<T>(d, pair(0, 0), pair(0, 1), b);
      y[0][0] = d[0], y[0][1] = d[1], y[1][0] = d[2], y[1][1] = d[3];
    } else {
      const uint32_t a[4] = {pair(0, 0), pair(0, 1), pair(2, 0), pair(2, 1)};
#pragma unroll
      for (int n = 0; n < 2; ++n) {
        float d[4] = {y[0][2 * n], y[0][2 * n + 1], y[1][2 * n], y[1][2 * n + 1]};
        arch::mma_16<T>(d, a, b, n == 0 ? b : b ^ 0x80008000u);
        y[0][2 * n] = d[0], y[0][2 * n + 1] = d[1], y[1][2 * n] = d[2], y[1][2 * n + 1] = d[3];
      }
    }
  }
};

}  // namespace sagebwd::cuda::tile
