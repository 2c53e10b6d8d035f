// SPDX-License-Identifier: Apache-2.0
// Rows of the caller's tensors, where they are and in registers. Neighbouring lanes share tokens,
// and each has some of the channels, in chunks of eight.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <type_traits>

#include "cuda/arch/scalar.cuh"
#include "cuda/tile/sequence.cuh"

namespace sagebwd::cuda::tuned {

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

/// Reduces kSteps values over the kLanes that share tokens: member m of these gets the result of
/// value m % kSteps. In each round a lane hands half of its values to a neighbour, which takes far
/// fewer exchanges than one reduction per value. The order of operations is the same for every
/// lane.
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

}  // namespace sagebwd::cuda::tuned
