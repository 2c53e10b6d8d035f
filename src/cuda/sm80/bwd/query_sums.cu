// SPDX-License-Identifier: Apache-2.0
// The FP32 sums of dQ to the caller's tensor, with the rotation turned back. A warp takes 16 whole
// rows: in the order of the sums (tile::turned_row) a lane has eight neighbouring channels of each
// 32, of two queries.
#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include "cuda/arch/global_add.cuh"
#include "cuda/host/launch.h"
#include "cuda/sm80/bwd/launch.h"
#include "cuda/tile/convert.cuh"
#include "cuda/tile/rotate.cuh"
#include "cuda/tile/sequence.cuh"

namespace sagebwd::cuda::sm80 {
namespace {

constexpr int kThreads = 256;

/// x ← x·Rᵀ for a row that four lanes hold, eight channels of each part of 32.
template <int kParts>
__device__ void turn_back(float (&x)[kParts][8], uint32_t lane, int size) {
#pragma unroll
  for (int part = 0; part < kParts; ++part) {
    tile::hadamard_inside(x[part]);
    for (int h = 8; h < size && h < 32; h *= 2)
      tile::hadamard_across(x[part], h / 8, (lane % 4 * 8 & static_cast<uint32_t>(h)) != 0);
  }
#pragma unroll
  for (int h = 1; h < kParts; h *= 2) {
    if (32 * h >= size) break;
#pragma unroll
    for (int part = 0; part < kParts; ++part)
#pragma unroll
      for (int e = 0; e < 8; ++e)
        if ((part & h) == 0) {
          const float a = x[part][e], b = x[part + h][e];
          x[part][e] = a + b, x[part + h][e] = a - b;
        }
  }
  const float unit = numerics::rotation_unit(size);
#pragma unroll
  for (int part = 0; part < kParts; ++part) {
#pragma unroll
    for (int e = 0; e < 8; ++e) x[part][e] *= unit;
    tile::flip_signs(x[part], static_cast<uint32_t>(part) * 32 + lane % 4 * 8);
  }
}

/// dS·K = dS·(K - mean) + rowsum(dS)·mean. Rows of dS sum to zero, to dLSE when that is given, and
/// to what was added up when the call sees a part of the keys.
template <typename T, int D>
__global__ void __launch_bounds__(kThreads)
    query_sums_kernel(const __grid_constant__ BackwardParams p) {
  constexpr int kParts = D / 32;
  const int head = static_cast<int>(blockIdx.y);
  const uint32_t lane = threadIdx.x % 32;
  const int64_t padded =
      static_cast<int64_t>(blockIdx.x) * kBlock + threadIdx.x / 32 * 16;  // of 16 queries
  const tile::Sequence s =
      tile::sequence_of_block<kBlock>(p.seq, static_cast<int>(padded / kBlock), true);
  if (padded - s.q_pad >= s.nq) return;
  const float* from = p.dq_sum + (head * p.tq + padded) * D;
  const float* k_mean = p.k_mean + (static_cast<int64_t>(s.index) * p.hk + head / p.group) * D;
#pragma unroll
  for (int r = 0; r < 2; ++r) {  // rows g and g + 8
    const int query = static_cast<int>(padded - s.q_pad) + static_cast<int>(lane / 4) + 8 * r;
    const bool real = query < s.nq;
    const QueryRow row = p.q_row[head * p.tq + s.q_pad + query];
    const float factor = real ? p.scale / row.logit_factor : 0.0f;
    float x[kParts][8];
#pragma unroll
    for (int part = 0; part < kParts; ++part)
#pragma unroll
      for (int e = 0; e < 8; ++e)
        x[part][e] =
            from[(part * 4 + e / 2) * 128 + arch::sum_at(lane, 2 * r + e % 2)] * factor;
    if (p.rotation > 0) turn_back(x, lane, p.rotation);
    if (!real) continue;
    float total = 0.0f;
    if (p.row_sum != nullptr)
      total = factor * p.row_sum[head * p.tq + s.q_pad + query];
    else if (p.dlse.data != nullptr && row.lse2 != INFINITY)
      total = p.scale * *tile::stat_of(p.dlse, s, head, s.q_begin + query);
    T* out = tile::row_of<T>(p.dq, s, head, s.q_begin + query);
#pragma unroll
    for (int part = 0; part < kParts; ++part) {
      const int channel = part * 32 + static_cast<int>(lane % 4 * 8);
      if (channel >= p.d) break;
      if (p.row_sum != nullptr || p.dlse.data != nullptr)
#pragma unroll
        for (int e = 0; e < 8; ++e) x[part][e] += total * k_mean[channel + e];
      uint4 bits;
      uint32_t* word = reinterpret_cast<uint32_t*>(&bits);
#pragma unroll
      for (int c = 0; c < 4; ++c)
        word[c] = tile::pack_16<T>(x[part][2 * c], x[part][2 * c + 1]);
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
void launch_query_sums(const BackwardParams& p, int q_blocks, cudaStream_t stream) {
  static_assert(kBlock == 16 * (kThreads / 32));
  launch(query_sums_kernel<T, D>,
         dim3(static_cast<unsigned>(q_blocks), static_cast<unsigned>(p.h)), kThreads, 0, p, stream);
}

template void launch_query_sums<__nv_bfloat16, 64>(const BackwardParams&, int, cudaStream_t);
template void launch_query_sums<__nv_bfloat16, 128>(const BackwardParams&, int, cudaStream_t);
template void launch_query_sums<__half, 64>(const BackwardParams&, int, cudaStream_t);
template void launch_query_sums<__half, 128>(const BackwardParams&, int, cudaStream_t);

}  // namespace sagebwd::cuda::sm80
