// SPDX-License-Identifier: Apache-2.0
// The first kernel of a backward: the largest scales of K and V of each sequence, and zeros where
// the call needs them.
#pragma once

#include "cuda/arch/kernel_order.cuh"
#include "cuda/sm90/bwd/operands.h"
#include "cuda/tile/layout.h"
#include "cuda/tile/sequence.cuh"
#include "cuda/tuned/exact_scale.cuh"

namespace sagebwd::cuda::sm90 {

inline constexpr int kTopThreads = 512;
inline constexpr int64_t kMostZeroBlocks = 256;

/// Bits of finite scales; 0 for others. Their order is that of the numbers.
__device__ inline uint32_t bits_of_finite(float scale) {
  return numerics::is_finite(scale) ? __float_as_uint(scale) : 0u;
}

/// The thread's part of what is zeroed.
__device__ inline void clear_pieces(const tuned::Zeros& zeros) {
  for (const tuned::Zeros::Piece& piece : zeros.piece)
    for (int64_t i = static_cast<int64_t>(blockIdx.x) * kTopThreads + threadIdx.x; i < piece.words;
         i += static_cast<int64_t>(gridDim.x) * kTopThreads)
      piece.at[i] = 0;
}

/// Writes the largest numbers of all threads, as bits.
__device__ inline void write_tops(const BackwardJob& job, int place, uint32_t v_most,
                                  uint32_t k_most) {
  const int thread = static_cast<int>(threadIdx.x);
  __shared__ uint2 most[kTopThreads / 32];
  v_most = __reduce_max_sync(0xffffffffu, v_most), k_most = __reduce_max_sync(0xffffffffu, k_most);
  if (thread % 32 == 0) most[thread / 32] = make_uint2(v_most, k_most);
  __syncthreads();
  if (thread >= 32) return;
  const uint2 mine = thread < kTopThreads / 32 ? most[thread] : make_uint2(0, 0);
  v_most = __reduce_max_sync(0xffffffffu, mine.x), k_most = __reduce_max_sync(0xffffffffu, mine.y);
  if (thread != 0) return;
  job.v_top[place] = v_most, job.k_top[place] = k_most;
}

/// A thread block finds the scales of one head of one sequence. All of them zero the pieces.
__global__ void __launch_bounds__(kTopThreads)
    tops_kernel(const __grid_constant__ BackwardJob job) {
  arch::let_next_kernel_start();
  clear_pieces(job.zeros);
  const int place = static_cast<int>(blockIdx.x), thread = static_cast<int>(threadIdx.x);
  if (place >= job.seq.count * job.hk) return;
  const int sequence = place / job.hk, head = place % job.hk;
  const tile::Sequence s = tile::sequence_at<kBlock>(job.seq, sequence);
  uint32_t v_most = 0, k_most = 0;
  const float* v_scale =
      job.saved.v_scale + head * job.saved.keys + s.batch * job.seq.nk + s.k_begin;
  if (job.keys_are_ready) {  // whole blocks: four scales at a time
#pragma unroll 4
    for (int i = thread; i < s.nk / 4; i += kTopThreads) {
      const float4 x = reinterpret_cast<const float4*>(v_scale)[i];
      v_most = max(v_most, max(max(bits_of_finite(x.x), bits_of_finite(x.y)),
                               max(bits_of_finite(x.z), bits_of_finite(x.w))));
    }
  } else {
#pragma unroll 4
    for (int i = thread; i < s.nk; i += kTopThreads)
      v_most = max(v_most, bits_of_finite(v_scale[i]));
  }
  const float* k_scale =
      job.saved.k_scale + head * job.saved.key_blocks + static_cast<int>(s.k_pad / kBlock);
  for (int i = thread; i < (s.nk + kBlock - 1) / kBlock; i += kTopThreads)
    if (numerics::is_finite(k_scale[i]))
      k_most = max(k_most, __float_as_uint(tuned::exact_scale(k_scale[i])));
  write_tops(job, place, v_most, k_most);
}

}  // namespace sagebwd::cuda::sm90
