// SPDX-License-Identifier: Apache-2.0
// Rows of the caller's tensors in shared memory and in registers.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cfloat>

#include "cuda/arch/kernel_order.cuh"
#include "cuda/sla2/linear/jobs.h"
#include "cuda/tile/convert.cuh"
#include "cuda/tile/shared_tile.cuh"

namespace sagebwd::cuda::sla2::linear {

inline constexpr uint32_t kAllLanes = 0xffffffffu;

/// The first step of every kernel here, before it touches memory (Kind::start).
__device__ __forceinline__ void take_turn() {
  arch::wait_for_earlier_kernels();
  arch::let_next_kernel_start();
}

/// Where the tokens of a head of the pass start.
__device__ __forceinline__ int64_t offset_of_head(const Strided& x, const Tokens& t, int head) {
  const int64_t at = t.first + head;
  return at / t.of_batch * x.batch + at % t.of_batch * x.head;
}
template <typename T>
__device__ __forceinline__ const T* row_of(const Tokens& t, int head, int token) {
  return static_cast<const T*>(t.x.data) + offset_of_head(t.x, t, head) + token * t.x.token;
}
template <typename T>
__device__ __forceinline__ T* row_of(const Strided& x, const Tokens& t, int head, int token) {
  return static_cast<T*>(x.data) + offset_of_head(x, t, head) + token * x.token;
}
__device__ __forceinline__ float* stat_of(const StridedStats& x, const Tokens& t, int head,
                                          int token) {
  const int64_t at = t.first + head;
  return x.data + at / t.of_batch * x.batch + at % t.of_batch * x.head + token * x.token;
}

/// α of the queries of a piece.
__device__ __forceinline__ float alpha_of(const Mixing& m, const Tokens& t, int head, int first) {
  const int64_t at = t.first + head;
  return m.alpha[(m.of_batch ? at : at % t.of_batch) * m.rows + first / m.block];
}

template <typename T>
__device__ __forceinline__ float2 unpack_16(uint32_t bits) {
  const T* x = reinterpret_cast<const T*>(&bits);
  return {static_cast<float>(x[0]), static_cast<float>(x[1])};
}

/// Eight neighbouring values.
template <typename T>
__device__ __forceinline__ uint4 load_chunk(const T* from, bool vector) {
  if (vector) return *reinterpret_cast<const uint4*>(from);
  uint32_t words[4];
  T* to = reinterpret_cast<T*>(words);
#pragma unroll
  for (int i = 0; i < 8; ++i) to[i] = from[i];
  return make_uint4(words[0], words[1], words[2], words[3]);
}
template <typename T>
__device__ __forceinline__ void unpack_chunk(float (&to)[8], const uint4& chunk) {
  const uint32_t words[4] = {chunk.x, chunk.y, chunk.z, chunk.w};
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const float2 pair = unpack_16<T>(words[i]);
    to[2 * i] = pair.x, to[2 * i + 1] = pair.y;
  }
}
template <typename T>
__device__ __forceinline__ uint4 pack_chunk(const float (&x)[8]) {
  return make_uint4(tile::pack_16<T>(x[0], x[1]), tile::pack_16<T>(x[2], x[3]),
                    tile::pack_16<T>(x[4], x[5]), tile::pack_16<T>(x[6], x[7]));
}

/// Starts copying kPiece tokens from `first` on into a tile; zeros behind the last one.
template <typename T, int D, int kThreads>
__device__ __forceinline__ void load_piece(uint32_t to, const Tokens& t, int head, int first,
                                           uint32_t thread) {
  const T* from = row_of<T>(t, head, first);
  if (t.x.vector) {
    tile::load_rows<kPiece, D * 2, kThreads>(to, from, t.x.token * 2, t.count - first, thread);
    return;
  }
  constexpr int kChunks = D / 8;
  for (int i = static_cast<int>(thread); i < kPiece * kChunks; i += kThreads) {
    const int row = i / kChunks, chunk = i % kChunks;
    uint4 value = make_uint4(0, 0, 0, 0);
    if (first + row < t.count) value = load_chunk(from + row * t.x.token + chunk * 8, false);
    *static_cast<uint4*>(arch::shared_pointer(to + tile::swizzled<D * 2>(row, chunk), 16)) = value;
  }
}

__device__ __forceinline__ float quad_sum(float x) {
  x += __shfl_xor_sync(kAllLanes, x, 1);
  return x + __shfl_xor_sync(kAllLanes, x, 2);
}
__device__ __forceinline__ float quad_max(float x) {
  x = fmaxf(x, __shfl_xor_sync(kAllLanes, x, 1));
  return fmaxf(x, __shfl_xor_sync(kAllLanes, x, 2));
}

/// 1/x; 0 where x is too small to divide by.
__device__ __forceinline__ float inverse_or_zero(float x) { return x < FLT_MIN ? 0.0f : 1.0f / x; }

/// The power of two next to a magnitude from below, within what can be inverted.
__device__ __forceinline__ float power_below(float x) {
  const uint32_t exponent = min(max(__float_as_uint(x) >> 23 & 255u, 27u), 253u);
  return __uint_as_float(exponent << 23);
}

/// Averages are not larger than a magnitude, but for rounding, so less than 2^14 with this factor.
__device__ __forceinline__ float average_scale(float magnitude) {
  return 0x1p12f / power_below(magnitude);
}

inline constexpr float kLog2E = 1.4426950408889634f;

/// Calls f with a type and a head dim.
template <typename F>
void dispatch(const Kind& kind, F&& f) {
  const auto with = [&](auto type) {
    if (kind.d == 64)
      f(type, std::integral_constant<int, 64>{});
    else
      f(type, std::integral_constant<int, 128>{});
  };
  if (kind.dtype == Dtype::bf16)
    with(__nv_bfloat16{});
  else
    with(__half{});
}

}  // namespace sagebwd::cuda::sla2::linear
