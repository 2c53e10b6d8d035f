// SPDX-License-Identifier: Apache-2.0
// FP32 pairs to 16-bit storage.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>
#include <type_traits>

#include "numerics/quantize.h"

namespace sagebwd::cuda::tile {

template <typename T>
__device__ __forceinline__ uint32_t pack_16(float low, float high);

template <>
__device__ __forceinline__ uint32_t pack_16<__nv_bfloat16>(float low, float high) {
  const __nv_bfloat162 v = __floats2bfloat162_rn(low, high);
  return *reinterpret_cast<const uint32_t*>(&v);
}
template <>
__device__ __forceinline__ uint32_t pack_16<__half>(float low, float high) {
  const __half2 v = __floats2half2_rn(low, high);
  return *reinterpret_cast<const uint32_t*>(&v);
}

/// A value of O as its type can hold it.
template <typename T>
__device__ __forceinline__ float of_output(float x) {
  return std::is_same_v<T, __half> ? numerics::within_f16(x) : x;
}

/// Two neighbouring values. `vector`: their address is a multiple of 4 bytes.
template <typename T>
__device__ __forceinline__ void store_pair(T* to, float a, float b, bool vector) {
  const uint32_t bits = pack_16<T>(a, b);
  if (vector) {
    *reinterpret_cast<uint32_t*>(to) = bits;
  } else {
    const T* v = reinterpret_cast<const T*>(&bits);
    to[0] = v[0], to[1] = v[1];
  }
}

/// Eight neighbouring values. `vector` as in store_pair.
template <typename T>
__device__ void store_eight(T* to, const float (&x)[8], bool vector) {
  if (reinterpret_cast<uintptr_t>(to) % 16 == 0)
    *reinterpret_cast<uint4*>(to) = make_uint4(pack_16<T>(x[0], x[1]), pack_16<T>(x[2], x[3]),
                                               pack_16<T>(x[4], x[5]), pack_16<T>(x[6], x[7]));
  else
#pragma unroll
    for (int e = 0; e < 8; e += 2) store_pair(to + e, x[e], x[e + 1], vector);
}

}  // namespace sagebwd::cuda::tile
