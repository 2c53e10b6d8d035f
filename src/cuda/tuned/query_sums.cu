// SPDX-License-Identifier: Apache-2.0
// The sums of dQ to the caller's tensor, with the rotation turned back. A warp takes 16 whole
// rows: in the order of the sums (tile::turned_row) a lane has eight neighbouring channels of each
// 32, of two queries.
#include "cuda/arch/global_add.cuh"
#include "cuda/arch/kernel_order.cuh"
#include "cuda/arch/scalar.cuh"
#include "cuda/host/instance.h"
#include "cuda/host/launch.h"
#include "cuda/tile/convert.cuh"
#include "cuda/tile/layout.h"
#include "cuda/tile/rotate.cuh"
#include "cuda/tile/sequence.cuh"
#include "cuda/tuned/query_sums.h"

namespace sagebwd::cuda::tuned {
namespace {

constexpr int kThreads = 256;

/// Thread blocks on a multiprocessor, by the registers that a lane's sums take.
template <int D, typename Sum, bool kMean>
inline constexpr int kResident = sizeof(Sum) == 2 && !kMean ? (D == 64 ? 4 : 3)
                                 : D == 64                  ? 3
                                                            : 2;

/// A lane's sums of 16 rows as they lie in memory: blocks of eight channels behind one another, of
/// rows g and g + 8 each.
template <typename Sum, int kParts>
struct LaneSums;

template <int kParts>
struct LaneSums<float, kParts> {
  float4 block[kParts][4];
  __device__ __forceinline__ LaneSums(const float* from, uint32_t lane) {
#pragma unroll
    for (int part = 0; part < kParts; ++part)
#pragma unroll
      for (int c = 0; c < 4; ++c)
        block[part][c] = arch::last_sums(from + (part * 4 + c) * 128, lane);
  }
  /// Times `factor`, row g + 8r.
  __device__ __forceinline__ void scaled(float (&x)[kParts][8], int r, float factor) const {
#pragma unroll
    for (int part = 0; part < kParts; ++part)
#pragma unroll
      for (int c = 0; c < 4; ++c) {
        const float4& b = block[part][c];
        x[part][2 * c] = (r == 0 ? b.x : b.z) * factor;
        x[part][2 * c + 1] = (r == 0 ? b.y : b.w) * factor;
      }
  }
};

template <int kParts>
struct LaneSums<__half, kParts> {
  uint4 blocks[kParts][2];
  __device__ __forceinline__ LaneSums(const __half* from, uint32_t lane) {
#pragma unroll
    for (int part = 0; part < kParts; ++part)
#pragma unroll
      for (int i = 0; i < 2; ++i)
        blocks[part][i] = arch::last_halves(from + (part * 2 + i) * 256, lane);
  }
  __device__ __forceinline__ void scaled(float (&x)[kParts][8], int r, float factor) const {
#pragma unroll
    for (int part = 0; part < kParts; ++part)
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const uint4& b = blocks[part][i];
        const uint32_t word[2] = {r == 0 ? b.x : b.y, r == 0 ? b.z : b.w};
#pragma unroll
        for (int w = 0; w < 2; ++w) {
          const float2 pair = __half22float2(reinterpret_cast<const __half2&>(word[w]));
          x[part][4 * i + 2 * w] = pair.x * factor, x[part][4 * i + 2 * w + 1] = pair.y * factor;
        }
      }
  }
};

/// Turns the rotation of a row back. `units`: what each channel is multiplied by in the end, 1/√n
/// with the sign of the channel.
template <int kParts>
__device__ __forceinline__ void turn_back(float (&x)[kParts][8], uint32_t member, int rotation,
                                          const float* units) {
  constexpr int kAll = kParts * 32;
  if (rotation == kAll)  // most calls; the constant saves instructions
    tile::hadamard<false>(x, member, kAll);
  else
    tile::hadamard<false>(x, member, rotation);
#pragma unroll
  for (int part = 0; part < kParts; ++part) {
    const auto* from = reinterpret_cast<const float4*>(units + part * 32 + member * 8);
    const float4 low = from[0], high = from[1];
    const float unit[8] = {low.x, low.y, low.z, low.w, high.x, high.y, high.z, high.w};
#pragma unroll
    for (int e = 0; e < 8; ++e) x[part][e] = __fmul_rn(x[part][e], unit[e]);
  }
}

/// Adds `total` times the mean of K.
template <int kParts>
__device__ __forceinline__ void add_mean(float (&x)[kParts][8], float total, const float* mean,
                                         uint32_t member, int d) {
#pragma unroll
  for (int part = 0; part < kParts; ++part) {
    const int channel = part * 32 + static_cast<int>(member * 8);
    if (channel >= d) break;
#pragma unroll
    for (int e = 0; e < 8; ++e) x[part][e] += total * mean[channel + e];
  }
}

/// dS·K = dS·(K - mean) + rowsum(dS)·mean. Rows of dS sum to zero, to dLSE when that is given, and
/// to what was added up when the call sees a part of the keys; what a cap takes from dS comes off.
/// Sum: float or __half. kMean: there may be such row sums; else nothing is added. Sums in float
/// have one kernel for both.
template <typename T, int D, typename Sum, bool kMean>
__global__ void __launch_bounds__(kThreads, kResident<D, Sum, kMean>)
    query_sums_kernel(const __grid_constant__ QuerySums p) {
  __shared__ __align__(16) float units[D];
  if (p.rotation > 0 && threadIdx.x < D) {
    const int channel = static_cast<int>(threadIdx.x);
    const float unit = numerics::rotation_unit(p.rotation);
    units[channel] = numerics::rotation_flips(channel) ? -unit : unit;
  }
  __syncthreads();
  arch::wait_for_earlier_kernels();
  constexpr int kParts = D / 32;
  // Heads first: in the caller's memory they may lie side by side.
  const int block = static_cast<int>(blockIdx.x) / p.h,
            head = static_cast<int>(blockIdx.x) - block * p.h;
  const uint32_t lane = threadIdx.x % 32, member = lane % 4;
  // The first of the warp's 16 queries.
  const int64_t padded = static_cast<int64_t>(block) * kBlock + threadIdx.x / 32 * 16;
  const tile::Sequence s = tile::sequence_of_block<kBlock>(p.seq, block, true);
  if (padded - s.q_pad >= s.nq) return;
  // All is asked for before anything is waited for.
  uint32_t top = __float_as_uint(1.0f);
  if (p.k_top != nullptr) top = p.k_top[static_cast<int64_t>(s.index) * p.hk + head / p.group];
  arch::keep(top);
  const LaneSums<Sum, kParts> sums(static_cast<const Sum*>(p.sums) + (head * p.tq + padded) * D,
                                   lane);
  const int first = static_cast<int>(padded - s.q_pad) + static_cast<int>(lane / 4);
  const QueryRow* rows = p.rows + head * p.tq + s.q_pad + first;
  uint32_t divisors[2] = {__float_as_uint(rows[0].divisor), __float_as_uint(rows[8].divisor)};
  arch::keep(divisors[0]), arch::keep(divisors[1]);
  const float scale = p.scale * __uint_as_float(top);
  const float factors[2] = {scale / __uint_as_float(divisors[0]),
                            scale / __uint_as_float(divisors[1])};
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    float x[kParts][8];
    sums.scaled(x, r, factors[r]);
    if (p.rotation > 0) turn_back(x, member, p.rotation, units);
    const int query = first + 8 * r;
    if (query >= s.nq) continue;
    if (kMean && (sizeof(Sum) == 2 || p.row_sum != nullptr || p.dlse.data != nullptr)) {
      float total = 0.0f;  // the row sum of dS times c
      if (p.row_sum != nullptr)
        total = p.scale / rows[8 * r].divisor * p.row_sum[head * p.tq + s.q_pad + query];
      else if (rows[8 * r].lse2 != INFINITY)
        total = p.scale * *tile::stat_of(p.dlse, s, head, s.q_begin + query);
      if (p.sums_what_cap_takes) {
        const bool given = p.dlse.data != nullptr && rows[8 * r].lse2 != INFINITY;
        total =
            (given ? p.scale * *tile::stat_of(p.dlse, s, head, s.q_begin + query) : 0.0f) - total;
      }
      add_mean(x, total,
               p.k_mean + (static_cast<int64_t>(s.index) * p.hk + head / p.group) * p.k_mean_d,
               member, p.d);
    }
    T* out = tile::row_of<T>(p.dq, s, head, s.q_begin + query);
#pragma unroll
    for (int part = 0; part < kParts; ++part) {
      const int channel = part * 32 + static_cast<int>(member * 8);
      if (channel >= p.d) break;
      uint4 bits;
      uint32_t* word = reinterpret_cast<uint32_t*>(&bits);
#pragma unroll
      for (int c = 0; c < 4; ++c) word[c] = tile::pack_16<T>(x[part][2 * c], x[part][2 * c + 1]);
      if (p.chunks) {
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

void launch_query_sums(const QuerySums& p, Dtype dtype, int padded_d, int q_blocks,
                       cudaStream_t stream, Start start) {
  static_assert(kBlock == 16 * (kThreads / 32));
  const bool mean = !p.halves || p.row_sum != nullptr || p.dlse.data != nullptr;
  with_instance(dtype, padded_d, [&]<typename T, int D>() {
    launch(!p.halves ? query_sums_kernel<T, D, float, true>
           : mean    ? query_sums_kernel<T, D, __half, true>
                     : query_sums_kernel<T, D, __half, false>,
           dim3(static_cast<unsigned>(q_blocks) * static_cast<unsigned>(p.h)), kThreads, 0, p,
           stream, start);
  });
}

}  // namespace sagebwd::cuda::tuned
