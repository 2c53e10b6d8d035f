// SPDX-License-Identifier: Apache-2.0
// The FP32 sums of dQ to the caller's tensor, with the rotation turned back. A warp takes 16 whole
// rows: in the order of the sums (tile::turned_row) a lane has eight neighbouring channels of each
// 32, of two queries.
#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include "cuda/arch/global_add.cuh"
#include "cuda/arch/kernel_order.cuh"
#include "cuda/host/launch.h"
#include "cuda/sm80/bwd/launch.h"
#include "cuda/tile/convert.cuh"
#include "cuda/tile/rotate.cuh"
#include "cuda/tile/sequence.cuh"

namespace sagebwd::cuda::sm80 {
namespace {

constexpr int kThreads = 256;

/// A lane's sums of 16 rows: blocks of eight channels behind one another.
template <int kParts>
__device__ __forceinline__ void load_sums(float (&x)[2][kParts][8], const float* from,
                                          uint32_t lane) {
#pragma unroll
  for (int part = 0; part < kParts; ++part)
#pragma unroll
    for (int c = 0; c < 4; ++c) {
      const float4 sums = arch::last_sums(from + (part * 4 + c) * 128, lane);
      x[0][part][2 * c] = sums.x, x[0][part][2 * c + 1] = sums.y;
      x[1][part][2 * c] = sums.z, x[1][part][2 * c + 1] = sums.w;
    }
}
template <int kParts>
__device__ __forceinline__ void load_sums(float (&x)[2][kParts][8], const __half* from,
                                          uint32_t lane) {
#pragma unroll
  for (int part = 0; part < kParts; ++part)
#pragma unroll
    for (int c = 0; c < 4; c += 2) {
      float2 sums[4];
      arch::last_halves(sums, from + (part * 4 + c) * 128, lane);
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int e = 2 * (c + i / 2);
        x[i % 2][part][e] = sums[i].x, x[i % 2][part][e + 1] = sums[i].y;
      }
    }
}

/// dS·K = dS·(K - mean) + rowsum(dS)·mean. Rows of dS sum to zero, to dLSE when that is given, and
/// to what was added up when the call sees a part of the keys.
/// Sum: float or __half.
template <typename T, int D, typename Sum>
__global__ void __launch_bounds__(kThreads)
    query_sums_kernel(const __grid_constant__ BackwardParams p) {
  arch::wait_for_earlier_kernels();
  constexpr int kParts = D / 32;
  const int head = static_cast<int>(blockIdx.y);
  const uint32_t lane = threadIdx.x % 32, member = lane % 4;
  const int64_t padded =
      static_cast<int64_t>(blockIdx.x) * kBlock + threadIdx.x / 32 * 16;  // of 16 queries
  const tile::Sequence s =
      tile::sequence_of_block<kBlock>(p.seq, static_cast<int>(padded / kBlock), true);
  if (padded - s.q_pad >= s.nq) return;
  // Before the sums are loaded: a division may call a function, which would spill some of them.
  const int first = static_cast<int>(padded - s.q_pad) + static_cast<int>(lane / 4);
  const QueryRow* rows = p.q_row + head * p.tq + s.q_pad + first;
  const float scale =
      p.k_top == nullptr
          ? p.scale
          : p.scale *
                __uint_as_float(p.k_top[static_cast<int64_t>(s.index) * p.hk + head / p.group]);
  const float factors[2] = {scale / rows[0].divisor, scale / rows[8].divisor};
  float totals[2] = {0.0f, 0.0f};  // row sums of dS times c
  if (p.row_sum != nullptr)
#pragma unroll
    for (int r = 0; r < 2; ++r)
      totals[r] = p.scale / rows[8 * r].divisor * p.row_sum[head * p.tq + s.q_pad + first + 8 * r];
  float x[2][kParts][8];  // rows g and g + 8
  load_sums(x, static_cast<const Sum*>(p.dq_sum) + (head * p.tq + padded) * D, lane);
#pragma unroll
  for (int r = 0; r < 2; ++r)
#pragma unroll
    for (int part = 0; part < kParts; ++part)
#pragma unroll
      for (int e = 0; e < 8; ++e) x[r][part][e] *= factors[r];
  if (p.rotation == D) {
#pragma unroll
    for (int r = 0; r < 2; ++r) tile::hadamard(x[r], member, D), tile::flip_signs(x[r], member);
  } else if (p.rotation > 0) {
#pragma unroll
    for (int r = 0; r < 2; ++r)
      tile::hadamard(x[r], member, p.rotation), tile::flip_signs(x[r], member);
  }
  const float* k_mean =
      p.k_mean + (static_cast<int64_t>(s.index) * p.hk + head / p.group) * p.k_mean_d;
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    const int query = first + 8 * r;
    if (query >= s.nq) continue;
    float total = totals[r];
    if (p.row_sum == nullptr && p.dlse.data != nullptr && rows[8 * r].lse2 != INFINITY)
      total = p.scale * *tile::stat_of(p.dlse, s, head, s.q_begin + query);
    T* out = tile::row_of<T>(p.dq, s, head, s.q_begin + query);
#pragma unroll
    for (int part = 0; part < kParts; ++part) {
      const int channel = part * 32 + static_cast<int>(member * 8);
      if (channel >= p.d) break;
      if (p.row_sum != nullptr || p.dlse.data != nullptr)
#pragma unroll
        for (int e = 0; e < 8; ++e) x[r][part][e] += total * k_mean[channel + e];
      uint4 bits;
      uint32_t* word = reinterpret_cast<uint32_t*>(&bits);
#pragma unroll
      for (int c = 0; c < 4; ++c)
        word[c] = tile::pack_16<T>(x[r][part][2 * c], x[r][part][2 * c + 1]);
      if (p.dq_chunks) {
        *reinterpret_cast<uint4*>(out + channel) = bits;
      } else {
        const T* v = reinterpret_cast<const T*>(&bits);
#pragma unroll
        for (int e = 0; e < 8; ++e) out[channel + e] = v[e];
      }
    }
  }
}

}  // namespace

template <typename T, int D>
void launch_query_sums(const BackwardParams& p, int q_blocks, cudaStream_t stream, Start start) {
  static_assert(kBlock == 16 * (kThreads / 32));
  launch(p.dq_halves ? query_sums_kernel<T, D, __half> : query_sums_kernel<T, D, float>,
         dim3(static_cast<unsigned>(q_blocks), static_cast<unsigned>(p.h)), kThreads, 0, p, stream,
         start);
}

template void launch_query_sums<__nv_bfloat16, 64>(const BackwardParams&, int, cudaStream_t, Start);
template void launch_query_sums<__nv_bfloat16, 128>(const BackwardParams&, int, cudaStream_t,
                                                    Start);
template void launch_query_sums<__half, 64>(const BackwardParams&, int, cudaStream_t, Start);
template void launch_query_sums<__half, 128>(const BackwardParams&, int, cudaStream_t, Start);

void launch_query_sums(const BackwardParams& p, Dtype dtype, int padded_d, int q_blocks,
                       cudaStream_t stream, Start start) {
  if (dtype == Dtype::bf16)
    padded_d == 64 ? launch_query_sums<__nv_bfloat16, 64>(p, q_blocks, stream, start)
                   : launch_query_sums<__nv_bfloat16, 128>(p, q_blocks, stream, start);
  else
    padded_d == 64 ? launch_query_sums<__half, 64>(p, q_blocks, stream, start)
                   : launch_query_sums<__half, 128>(p, q_blocks, stream, start);
}

}  // namespace sagebwd::cuda::sm80
