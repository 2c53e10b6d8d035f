// SPDX-License-Identifier: Apache-2.0
// Eight neighbouring channels of a token: what a thread takes at once. kLanes threads have a token,
// and those behind the last channel of a short one have nothing.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>
#include <type_traits>

#include "cuda/sla2/mix/jobs.h"
#include "cuda/tile/convert.cuh"

namespace sagebwd::cuda::sla2::mix {

inline constexpr int kThreads = 256;
inline constexpr uint32_t kAllLanes = 0xffffffffu;

/// The bits of eight channels.
template <typename T>
struct Eight {
  static constexpr int kWords = sizeof(T) / 2;  // of 16 bytes
  uint4 words[kWords];

  __device__ __forceinline__ void load(const T* from, bool vector) {
    if (vector) {
#pragma unroll
      for (int i = 0; i < kWords; ++i) words[i] = reinterpret_cast<const uint4*>(from)[i];
      return;
    }
    T* const to = reinterpret_cast<T*>(words);
#pragma unroll
    for (int i = 0; i < 8; ++i) to[i] = from[i];
  }
  __device__ __forceinline__ void store(T* to, bool vector) const {
    if (vector) {
#pragma unroll
      for (int i = 0; i < kWords; ++i) reinterpret_cast<uint4*>(to)[i] = words[i];
      return;
    }
    const T* const from = reinterpret_cast<const T*>(words);
#pragma unroll
    for (int i = 0; i < 8; ++i) to[i] = from[i];
  }
  __device__ __forceinline__ void clear() {
#pragma unroll
    for (int i = 0; i < kWords; ++i) words[i] = make_uint4(0, 0, 0, 0);
  }
  __device__ __forceinline__ float get(int i) const {
    return static_cast<float>(reinterpret_cast<const T*>(words)[i]);
  }
  __device__ __forceinline__ void set(const float (&x)[8]) {
    if constexpr (std::is_same_v<T, float>) {
#pragma unroll
      for (int i = 0; i < 8; ++i) reinterpret_cast<float*>(words)[i] = x[i];
    } else {
      words[0] = make_uint4(tile::pack_16<T>(x[0], x[1]), tile::pack_16<T>(x[2], x[3]),
                            tile::pack_16<T>(x[4], x[5]), tile::pack_16<T>(x[6], x[7]));
    }
  }
};

template <typename T>
__device__ __forceinline__ T* row_of(const Strided& x, int batch, int head, int token) {
  return static_cast<T*>(x.data) + batch * x.batch + head * x.head + token * x.token;
}

/// The sum of a number over the first `kCount` lanes of each kCount, in every one of them.
template <int kCount>
__device__ __forceinline__ float sum_of_lanes(float x) {
#pragma unroll
  for (int step = 1; step < kCount; step *= 2) x += __shfl_xor_sync(kAllLanes, x, step);
  return x;
}

/// Calls f with a type and the lanes of a token.
template <typename F>
void dispatch(const Kind& kind, F&& f) {
  const auto with = [&](auto type) {
    if (kind.d <= 64)
      f(type, std::integral_constant<int, 8>{});
    else if (kind.d <= 128)
      f(type, std::integral_constant<int, 16>{});
    else
      f(type, std::integral_constant<int, 32>{});
  };
  if (kind.dtype == Dtype::bf16)
    with(__nv_bfloat16{});
  else if (kind.dtype == Dtype::f16)
    with(__half{});
  else
    with(float{});
}

}  // namespace sagebwd::cuda::sla2::mix
