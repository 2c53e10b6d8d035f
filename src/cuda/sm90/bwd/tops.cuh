// SPDX-License-Identifier: Apache-2.0
// Before queries.cuh: the largest scales of K and V of each sequence, where saved codes serve as
// they are, and zeros where a call needs them.
#pragma once

#include "cuda/arch/kernel_order.cuh"
#include "cuda/quantize/exact_scale.cuh"
#include "cuda/quantize/quantize.h"
#include "cuda/tile/layout.h"

namespace sagebwd::cuda::sm90 {

inline constexpr int kTopThreads = 512;
inline constexpr int64_t kMostZeroBlocks = 256;

/// Bits of finite scales; 0 for others. Their order is that of the numbers.
__device__ inline uint32_t bits_of_finite(float scale) {
  return numerics::is_finite(scale) ? __float_as_uint(scale) : 0u;
}

/// A thread block finds the scales of one head of one sequence. All of them zero the pieces, but
/// for what holds the scales.
__global__ void __launch_bounds__(kTopThreads) tops_kernel(const __grid_constant__ OperandJob job) {
  arch::let_next_kernel_start();
  const int heads = job.seq.count * job.hk;
  for (const Zeros::Piece& piece : job.zeros.piece)
    for (int64_t i = static_cast<int64_t>(blockIdx.x) * kTopThreads + threadIdx.x; i < piece.words;
         i += static_cast<int64_t>(gridDim.x) * kTopThreads) {
      uint32_t* at = piece.at + i;
      const auto* v_top = reinterpret_cast<const uint32_t*>(job.v_top);
      const bool is_top =
          (at >= v_top && at < v_top + 2 * heads) || (at >= job.k_top && at < job.k_top + heads);
      if (!is_top) *at = 0;
    }
  const int place = static_cast<int>(blockIdx.x);
  if (place >= heads) return;
  const int sequence = place / job.hk, head = place % job.hk, blocks = job.seq.k_blocks;
  uint32_t v_most = 0, k_most = 0;
  // keys_are_ready: sequences have whole blocks.
  const auto* v_scale = reinterpret_cast<const float4*>(
      job.saved.v_scale + head * job.saved.keys + static_cast<int64_t>(sequence) * job.seq.nk);
#pragma unroll 4
  for (int i = static_cast<int>(threadIdx.x); i < blocks * (kBlock / 4); i += kTopThreads) {
    const float4 x = v_scale[i];
    v_most = max(v_most, max(max(bits_of_finite(x.x), bits_of_finite(x.y)),
                             max(bits_of_finite(x.z), bits_of_finite(x.w))));
  }
  const float* k_scale =
      job.saved.k_scale + head * job.saved.key_blocks + static_cast<int64_t>(sequence) * blocks;
  for (int i = static_cast<int>(threadIdx.x); i < blocks; i += kTopThreads)
    if (numerics::is_finite(k_scale[i]))
      k_most = max(k_most, __float_as_uint(exact_scale(k_scale[i])));
  __shared__ uint2 most[kTopThreads / 32];
  v_most = __reduce_max_sync(0xffffffffu, v_most), k_most = __reduce_max_sync(0xffffffffu, k_most);
  if (threadIdx.x % 32 == 0) most[threadIdx.x / 32] = make_uint2(v_most, k_most);
  __syncthreads();
  if (threadIdx.x >= 32) return;
  const uint2 mine = threadIdx.x < kTopThreads / 32 ? most[threadIdx.x] : make_uint2(0, 0);
  v_most = __reduce_max_sync(0xffffffffu, mine.x), k_most = __reduce_max_sync(0xffffffffu, mine.y);
  if (threadIdx.x != 0) return;
  job.v_top[place] = make_uint2(v_most, static_cast<uint32_t>(blocks));
  job.k_top[place] = k_most;
}

}  // namespace sagebwd::cuda::sm90
