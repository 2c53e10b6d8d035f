// SPDX-License-Identifier: Apache-2.0
// How rows come to the operand kernel. A thread block takes kBlock tokens of one head. Neighbouring
// lanes are a slot: they share neighbouring tokens, and each has some of the channels, in chunks of
// eight.
#pragma once

#include "cuda/arch/shared_memory.cuh"
#include "cuda/tile/layout.h"
#include "cuda/tuned/rows.cuh"

namespace sagebwd::cuda::sm80 {

using tuned::Chunk, tuned::Source;

inline constexpr int kRowThreads = 256;  // of a thread block

/// How rows are read. `again` leaves them in the second-level cache for another reader; `once`
/// marks them as the first to make room.
enum class Reading { again, once };

/// Loads eight channels of neighbouring tokens, `stride` elements apart. Tokens from `count` on are
/// zero.
template <Reading kReading, typename T, int kSteps>
__device__ __forceinline__ void load_chunks(Chunk<T> (&to)[kSteps], const T* at, int64_t stride,
                                            int count, bool vector) {
#pragma unroll
  for (int step = 0; step < kSteps; ++step) to[step].bits = make_uint4(0, 0, 0, 0);
  if (vector) {
#pragma unroll
    for (int step = 0; step < kSteps; ++step) {
      const auto* from = reinterpret_cast<const uint4*>(at + step * stride);
      if (step < count) to[step].bits = kReading == Reading::once ? __ldcs(from) : __ldcg(from);
    }
  } else {
#pragma unroll
    for (int step = 0; step < kSteps; ++step) {
      if (step >= count) break;
      T* v = reinterpret_cast<T*>(&to[step].bits);
#pragma unroll
      for (int e = 0; e < 8; ++e) v[e] = at[step * stride + e];
    }
  }
}

/// Chunks on their way into shared memory, 16 bytes for each thread. A thread reads only what it
/// has asked for, so it needs no barrier, and no two lanes use the same bank.
template <int D>
struct Stage {
  static constexpr int kChunks = kBlock * D / 8 / kRowThreads;
  uint4 chunk[kChunks][kRowThreads];

  /// Asks for the thread's chunks: eight channels of kSteps neighbouring tokens, `stride` bytes
  /// apart, and again 32 channels on. Tokens from `count` on are zero, and channels from `channels`
  /// on. Rows that are not aligned are loaded here and now, slowly.
  template <Reading kReading, int kSteps>
  __device__ __forceinline__ void start(const uint8_t* at, int64_t stride, int count, int channels,
                                        bool vector) {
    if (vector) {
#pragma unroll
      for (int i = 0; i < kChunks; ++i) {
        const uint32_t to = arch::shared_address(&chunk[i][threadIdx.x]);
        const uint8_t* from = at + i % kSteps * stride + i / kSteps * 64;
        const bool real = i % kSteps < count && i / kSteps * 32 < channels;
        if constexpr (kReading == Reading::once)
          arch::cp_async_16_once_or_zero(to, from, real);
        else
          arch::cp_async_16_or_zero(to, from, real);
      }
    } else {
#pragma unroll 1
      for (int i = 0; i < kChunks; ++i) {
        const auto* from =
            reinterpret_cast<const uint16_t*>(at + i % kSteps * stride + i / kSteps * 64);
        const bool real = i % kSteps < count && i / kSteps * 32 < channels;
        auto* to = reinterpret_cast<uint16_t*>(&chunk[i][threadIdx.x]);
#pragma unroll
        for (int e = 0; e < 8; ++e) to[e] = real ? from[e] : uint16_t{0};
      }
    }
  }
  /// The same for eight codes of each token.
  template <int kSteps>
  __device__ __forceinline__ void start_codes(const uint8_t* at, int64_t stride, int count,
                                              int channels) {
#pragma unroll
    for (int i = 0; i < kChunks; ++i)
      arch::cp_async_8_or_zero(arch::shared_address(&codes(i)),
                               at + i % kSteps * stride + i / kSteps * 32,
                               i % kSteps < count && i / kSteps * 32 < channels);
  }
  __device__ uint2& codes(int index) {
    return reinterpret_cast<uint2(*)[kRowThreads]>(chunk)[index][threadIdx.x];
  }
};

/// Whether x is true in any lane of the slot.
template <int kLanes>
__device__ __forceinline__ bool slot_any(bool x) {
  const unsigned votes = __ballot_sync(0xffffffffu, x);
  const int first = static_cast<int>(threadIdx.x % 32) / kLanes * kLanes;
  return ((votes >> first) & ((1u << kLanes) - 1u)) != 0;
}

}  // namespace sagebwd::cuda::sm80
