// SPDX-License-Identifier: Apache-2.0
// Rows of the caller's tensors in registers. A thread block takes kBlock tokens of one head.
// Neighbouring lanes are a slot: they share neighbouring tokens, and each has some of the channels,
// in chunks of eight.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <type_traits>

#include "cuda/arch/scalar.cuh"
#include "cuda/arch/shared_memory.cuh"
#include "cuda/tile/layout.h"
#include "cuda/tile/sequence.cuh"
#include "numerics/quantize.h"

namespace sagebwd::cuda {

inline constexpr int kRowThreads = 256;  // of a thread block

/// Eight values of one token.
template <typename T>
struct Chunk {
  uint4 bits;

  __device__ __forceinline__ void unpack(float (&x)[8]) const {
    const uint32_t word[4] = {bits.x, bits.y, bits.z, bits.w};
#pragma unroll
    for (int w = 0; w < 4; ++w) {
      if constexpr (std::is_same_v<T, __nv_bfloat16>) {
        x[2 * w] = __uint_as_float(word[w] << 16);
        x[2 * w + 1] = __uint_as_float(word[w] & 0xffff0000u);
      } else {
        const float2 pair = __half22float2(reinterpret_cast<const __half2&>(word[w]));
        x[2 * w] = pair.x, x[2 * w + 1] = pair.y;
      }
    }
  }

  __device__ __forceinline__ uint32_t word(int w) const {
    return w == 0 ? bits.x : w == 1 ? bits.y : w == 2 ? bits.z : bits.w;
  }

  /// Largest magnitude; keeps NaN.
  __device__ __forceinline__ float top() const {
    using Pair = std::conditional_t<std::is_same_v<T, __nv_bfloat16>, __nv_bfloat162, __half2>;
    const uint32_t word[4] = {bits.x, bits.y, bits.z, bits.w};
    Pair most = __habs2(reinterpret_cast<const Pair&>(word[0]));
#pragma unroll
    for (int w = 1; w < 4; ++w)
      most = __hmax2_nan(most, __habs2(reinterpret_cast<const Pair&>(word[w])));
    return arch::max_nan(static_cast<float>(most.x), static_cast<float>(most.y));
  }
};

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

/// Rows of one of the caller's tensors, or of saved codes.
struct Source {
  const uint8_t* at;  // the first token of a block
  int64_t stride;     // bytes from a token to the next
  bool vector;        // rows are aligned for copies of 16 bytes (codes: of 8)
};

/// Rows of a tensor of 16-bit elements from a token on.
__device__ inline Source source_of(const Strided& x, const tile::Sequence& s, int head,
                                   int64_t token) {
  return {reinterpret_cast<const uint8_t*>(tile::row_of<const uint16_t>(x, s, head, token)),
          x.token * 2, x.vector};
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

/// Reduces kSteps values over the lanes of a slot: member m of the slot gets the result of value
/// m % kSteps. In each round a lane hands half of its values to a neighbour, which takes far fewer
/// exchanges than one reduction per value. The order of operations is the same for every lane.
template <int kLanes, int kSteps, typename Op>
__device__ __forceinline__ float scatter_reduce(float (&v)[kSteps], uint32_t member, Op op) {
#pragma unroll
  for (int half = kSteps / 2; half > 0; half /= 2) {
    const bool upper = (member & static_cast<uint32_t>(half)) != 0;
#pragma unroll
    for (int i = 0; i < half; ++i) {
      const float give = upper ? v[i] : v[i + half], keep = upper ? v[i + half] : v[i];
      v[i] = op(keep, __shfl_xor_sync(0xffffffffu, give, half));
    }
  }
#pragma unroll
  for (int m = kSteps; m < kLanes; m *= 2) v[0] = op(v[0], __shfl_xor_sync(0xffffffffu, v[0], m));
  return v[0];
}

/// Whether x is true in any lane of the slot.
template <int kLanes>
__device__ __forceinline__ bool slot_any(bool x) {
  const unsigned votes = __ballot_sync(0xffffffffu, x);
  const int first = static_cast<int>(threadIdx.x % 32) / kLanes * kLanes;
  return ((votes >> first) & ((1u << kLanes) - 1u)) != 0;
}

}  // namespace sagebwd::cuda
