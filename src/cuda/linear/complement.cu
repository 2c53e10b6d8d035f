// SPDX-License-Identifier: Apache-2.0
// Sums of what blocks have over those that see each other: a product with a 0/1 matrix, in which
// nothing cancels. Vectors are added up in FP32. Matrices are products on the tensor cores: all d²
// numbers of a block are a row, so that the sums of a head are [rows, blocks]·[blocks, d²].
#include <type_traits>

#include "cuda/arch/mma_sync.cuh"
#include "cuda/host/launch.h"
#include "cuda/linear/rows.cuh"
#include "cuda/tile/quad.cuh"

namespace sagebwd::cuda::linear {
namespace {

/// The product of one key head. The query heads of a group lie one behind the other.
struct Product {
  int rows, depth;  // blocks that get sums, and blocks that have summands
  __host__ __device__ explicit Product(const ComplementJob& p)
      : rows(p.by_keys ? p.seen.columns : p.group * p.seen.rows),
        depth(p.by_keys ? p.group * p.seen.rows : p.seen.columns) {}
};

__device__ __forceinline__ const uint16_t* seen_of(const ComplementJob& p, int head) {
  return p.seen.at + static_cast<int64_t>(head) * p.group * p.seen.rows * p.seen.stride;
}
__device__ __forceinline__ bool sees(const ComplementJob& p, const uint16_t* seen, int row,
                                     int summand) {
  return seen[p.by_keys ? summand * p.seen.stride + row : row * p.seen.stride + summand] != 0;
}

constexpr int kVectorRows = 8, kWays = 4, kSummands = 32;  // kSummands of a way, at a time

/// A thread has a channel of kVectorRows sums, over kSummands of every kWays·kSummands blocks.
template <int D>
__global__ void __launch_bounds__(kWays* D, 1)
    vectors_kernel(const __grid_constant__ ComplementJob p) {
  __shared__ float4 seen_by[kWays][kSummands][kVectorRows / 4];
  __shared__ float parts[kWays - 1][kVectorRows][D];
  const Product size(p);
  const int c = static_cast<int>(threadIdx.x) % D, way = static_cast<int>(threadIdx.x) / D,
            head = static_cast<int>(blockIdx.y);
  const int which = static_cast<int>(blockIdx.z), row0 = static_cast<int>(blockIdx.x) * kVectorRows;
  const uint16_t* const seen = seen_of(p, head);
  const float* const from = p.sum[which] + static_cast<int64_t>(head) * size.depth * D + c;
  const bool finite = p.bad[head] == 0;
  float sum[kVectorRows] = {};
  for (int step = 0; step < size.depth; step += kSummands * kWays) {
    const int first = step + way * kSummands;
    // All are on their way before any is waited for.
    float x[kSummands];
#pragma unroll
    for (int i = 0; i < kSummands; ++i)
      x[i] = first + i < size.depth ? from[static_cast<int64_t>(first + i) * D] : 0.0f;
    __syncthreads();
    for (int e = c; e < kSummands * kVectorRows; e += D) {
      const int i = p.by_keys ? e / kVectorRows : e % kSummands,
                r = p.by_keys ? e % kVectorRows : e / kSummands;
      const bool is_seen =
          first + i < size.depth && row0 + r < size.rows && sees(p, seen, row0 + r, first + i);
      reinterpret_cast<float*>(seen_by[way][i])[r] = is_seen ? 1.0f : 0.0f;
    }
    __syncthreads();
#pragma unroll
    for (int i = 0; i < kSummands; ++i) {
      float factor[kVectorRows];
#pragma unroll
      for (int r = 0; r < kVectorRows; r += 4) {
        const float4 four = seen_by[way][i][r / 4];
        factor[r] = four.x, factor[r + 1] = four.y, factor[r + 2] = four.z, factor[r + 3] = four.w;
      }
      if (finite) {
#pragma unroll
        for (int r = 0; r < kVectorRows; ++r) sum[r] += factor[r] * x[i];
      } else {
#pragma unroll
        for (int r = 0; r < kVectorRows; ++r)
          if (factor[r] != 0.0f) sum[r] += x[i];
      }
    }
  }
#pragma unroll
  for (int r = 0; r < kVectorRows; ++r)
    if (way > 0) parts[way - 1][r][c] = sum[r];
  __syncthreads();
  if (way > 0) return;
#pragma unroll
  for (int r = 0; r < kVectorRows; ++r) {
    if (row0 + r >= size.rows) break;
    for (int w = 0; w < kWays - 1; ++w) sum[r] += parts[w][r][c];
    // What cannot be divided by counts as nothing.
    const bool nothing = which == 0 && sum[r] < FLT_MIN;
    p.sum_of_seen[which][(static_cast<int64_t>(head) * size.rows + row0 + r) * D + c] =
        nothing ? 0.0f : sum[r];
  }
}

constexpr int kTile = 128, kDepth = 64, kStages = 2, kThreads = 128;
constexpr int kStageBytes = 2 * kTile * kDepth * 2;

/// Starts copying the operands of kDepth summands.
template <bool kByKeys>
__device__ __forceinline__ void load_stage(uint32_t to, const ComplementJob& p, const Product& size,
                                           const uint16_t* seen, const uint16_t* matrix, int row0,
                                           int first, int64_t row_size, uint32_t thread) {
  const int left = size.depth - first;
  const int64_t stride = p.seen.stride * 2;
  if constexpr (kByKeys)
    tile::load_rows<kDepth, kTile * 2, kThreads>(to, seen + first * p.seen.stride + row0, stride,
                                                 left, thread);
  else
    tile::load_rows<kTile, kDepth * 2, kThreads>(to, seen + row0 * p.seen.stride + first, stride,
                                                 size.rows - row0, thread);
  tile::load_rows<kDepth, kTile * 2, kThreads>(to + kTile * kDepth * 2, matrix + first * row_size,
                                               row_size * 2, left, thread);
}

}  // namespace

/// Each warp has 64 x 64 of the 128 x 128 sums of a thread block.
template <int D, bool kByKeys>
__global__ void __launch_bounds__(kThreads, 3)
    matrices_kernel(const __grid_constant__ ComplementJob p) {
  using bf16 = __nv_bfloat16;
  extern __shared__ __align__(128) uint8_t memory[];
  const Product size(p);
  const int64_t row_size = D * D;
  const uint32_t thread = threadIdx.x, lane = thread % 32, warp = thread / 32;
  const int head = static_cast<int>(blockIdx.z), row0 = static_cast<int>(blockIdx.x) * kTile,
            column0 = static_cast<int>(blockIdx.y) * kTile;
  const uint16_t* const seen = seen_of(p, head);
  const uint16_t* const matrix = reinterpret_cast<const uint16_t*>(p.matrix) +
                                 static_cast<int64_t>(head) * size.depth * row_size + column0;
  __half* const average = reinterpret_cast<__half*>(p.average) +
                          static_cast<int64_t>(head) * size.rows * row_size + column0;
  const float* const sum = p.sum_of_seen[0] + static_cast<int64_t>(head) * size.rows * D;
  const float scale = average_scale(p.magnitude[head]);

  if (p.bad[head] != 0) {  // 0·NaN is NaN, so summands that are not seen must be left out
    const float* const sum_of_channel = sum + (column0 + thread) / D;
    for (int row = row0; row < min(row0 + kTile, size.rows); ++row) {
      float total = 0.0f;
      for (int i = 0; i < size.depth; ++i)
        if (sees(p, seen, row, i))
          total += static_cast<float>(reinterpret_cast<const bf16*>(matrix)[i * row_size + thread]);
      average[row * row_size + thread] =
          __half(total * scale * inverse_or_zero(sum_of_channel[row * D]));
    }
    return;
  }

  const uint32_t stages = arch::shared_address(memory);
  const uint32_t warp_row = warp / 2 * 64, warp_column = warp % 2 * 64;
  const int steps = (size.depth + kDepth - 1) / kDepth;
#pragma unroll
  for (int s = 0; s < kStages - 1; ++s) {
    if (s < steps)
      load_stage<kByKeys>(stages + s * kStageBytes, p, size, seen, matrix, row0, s * kDepth,
                          row_size, thread);
    arch::cp_async_commit();
  }
  float acc[4][8][4] = {};
  const bool works = row0 + static_cast<int>(warp_row) < size.rows;
  for (int at = 0; at < steps; ++at) {
    arch::cp_async_wait<kStages - 2>();
    __syncthreads();  // the stage is there, and everybody is done with the one before
    const int next = at + kStages - 1;
    if (next < steps)
      load_stage<kByKeys>(stages + next % kStages * kStageBytes, p, size, seen, matrix, row0,
                          next * kDepth, row_size, thread);
    arch::cp_async_commit();
    if (!works) continue;
    const uint32_t a_tile = stages + at % kStages * kStageBytes,
                   b_tile = a_tile + kTile * kDepth * 2;
#pragma unroll
    for (int step = 0; step < kDepth / 16; ++step) {
      uint32_t a[4][4];
#pragma unroll
      for (int m = 0; m < 4; ++m) {
        if constexpr (kByKeys)
          tile::load_a_trans<kTile * 2>(a[m], a_tile + step * 16 * kTile * 2, warp_row / 8 + 2 * m,
                                        lane);
        else
          arch::ldmatrix_x4(a[m], tile::step_of(a_tile + (warp_row + 16 * m) * kDepth * 2 +
                                                    tile::a_lane<kDepth * 2>(lane),
                                                step));
      }
#pragma unroll
      for (int n = 0; n < 8; n += 2) {
        uint32_t b[4];
        tile::load_b_trans<kTile * 2>(b, b_tile + step * 16 * kTile * 2, warp_column / 8 + n, lane);
#pragma unroll
        for (int m = 0; m < 4; ++m) {
          arch::mma_16<bf16>(acc[m][n], a[m], b[0], b[1]);
          arch::mma_16<bf16>(acc[m][n + 1], a[m], b[2], b[3]);
        }
      }
    }
  }
  arch::cp_async_wait<0>();

  const int channel = (column0 + static_cast<int>(warp_column)) / D;  // of φ
#pragma unroll
  for (int m = 0; m < 4; ++m)
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int row = row0 + static_cast<int>(warp_row + lane / 4) + 16 * m + 8 * half;
      const bool real = row < size.rows;
      const float inverse = real ? inverse_or_zero(sum[row * D + channel]) : 0.0f;
#pragma unroll
      for (int n = 0; n < 8; n += 4) {
        uint32_t words[4];
#pragma unroll
        for (int i = 0; i < 4; ++i)
          words[i] = tile::pack_16<__half>(acc[m][n + i][2 * half] * scale * inverse,
                                           acc[m][n + i][2 * half + 1] * scale * inverse);
        tile::store_quad(average + row * row_size + warp_column + n * 8, words, lane, true, real);
      }
    }
}

namespace {

template <int D>
void launch_for(const ComplementJob& job, cudaStream_t stream) {
  const Product size(job);
  const auto tiles = [](int64_t n, int64_t tile) {
    return static_cast<unsigned>((n + tile - 1) / tile);
  };
  const unsigned heads = static_cast<unsigned>(job.key_heads);
  launch(vectors_kernel<D>, dim3(tiles(size.rows, kVectorRows), heads, job.sum[1] ? 2 : 1),
         kWays * D, 0, job, stream);
  const dim3 grid(tiles(size.rows, kTile), tiles(D * D, kTile), heads);
  launch(job.by_keys ? matrices_kernel<D, true> : matrices_kernel<D, false>, grid, kThreads,
         kStages * kStageBytes, job, stream);
}

}  // namespace

void launch_complement(const Kind& kind, const ComplementJob& job) {
  if (kind.d == 64)
    launch_for<64>(job, kind.stream);
  else
    launch_for<128>(job, kind.stream);
}

}  // namespace sagebwd::cuda::linear
