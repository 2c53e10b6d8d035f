// SPDX-License-Identifier: Apache-2.0
// Sums of what blocks have over those that see each other: a product with a 0/1 matrix, in which
// nothing cancels. Vectors are added up in FP32. Matrices are products on the tensor cores: all d²
// numbers of a block are a row, so that the sums of a head are [rows, blocks]·[blocks, d²].
#include <type_traits>

#include "cuda/arch/mma_sync.cuh"
#include "cuda/host/launch.h"
#include "cuda/sla2/linear/rows.cuh"
#include "cuda/tile/quad.cuh"

namespace sagebwd::cuda::sla2::linear {
namespace {

/// The rows of a key head.
__device__ __forceinline__ const uint32_t* seen_of(const Seen& seen, int head) {
  return seen.at + static_cast<int64_t>(head) * seen.rows * seen.words;
}
__device__ __forceinline__ bool sees(const Seen& s, const uint32_t* seen, int row, int summand) {
  return (seen[row * s.words + summand / 32] >> summand % 32 & 1u) != 0;
}

constexpr int kVectorRows = 16, kWays = 4, kSummands = 32;  // kSummands of a way, at a time

/// A thread has a channel of kVectorRows sums, over kSummands of every kWays·kSummands blocks.
template <int D>
__global__ void __launch_bounds__(kWays* D, 1)
    vectors_kernel(const __grid_constant__ ComplementJob p) {
  __shared__ float4 seen_by[kWays][kSummands][kVectorRows / 4];
  __shared__ float parts[kWays - 1][kVectorRows][D];
  take_turn();
  const Seen& size = p.seen;
  const int c = static_cast<int>(threadIdx.x) % D, way = static_cast<int>(threadIdx.x) / D,
            head = static_cast<int>(blockIdx.y);
  const int which = static_cast<int>(blockIdx.z), row0 = static_cast<int>(blockIdx.x) * kVectorRows;
  const uint32_t* const seen = seen_of(size, head);
  const float* const from = p.sum[which] + static_cast<int64_t>(head) * size.columns * D + c;
  const bool finite = p.bad[head] == 0;
  float sum[kVectorRows] = {};
  for (int step = 0; step < size.columns; step += kSummands * kWays) {
    const int first = step + way * kSummands;
    // All are on their way before any is waited for.
    float x[kSummands];
#pragma unroll
    for (int i = 0; i < kSummands; ++i)
      x[i] = first + i < size.columns ? from[static_cast<int64_t>(first + i) * D] : 0.0f;
    __syncthreads();
    for (int e = c; e < kSummands * kVectorRows; e += D) {
      const int i = e % kSummands, r = e / kSummands;
      const bool is_seen =
          first + i < size.columns && row0 + r < size.rows && sees(size, seen, row0 + r, first + i);
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

constexpr int kTile = 128, kDepth = 64, kStages = 3, kThreads = 256;
constexpr int kStageBytes = kTile * kDepth * 2;
/// Words of a row of bits in shared memory; two more keep the rows of a quad's lanes in different
/// banks.
constexpr int kBitWords = 32, kBitRow = kBitWords + 2;
constexpr int kMatricesBytes = kStages * kStageBytes + kTile * kBitRow * 4;

/// Copies kBitWords words of bits, those from summand `first` on.
__device__ __forceinline__ void load_bits(uint32_t* to, const Seen& s, int head, int row0,
                                          int first, uint32_t thread) {
  const uint32_t* const seen = seen_of(s, head);
  const int word0 = first / 32;
  for (int e = static_cast<int>(thread); e < kTile * kBitWords; e += kThreads) {
    const int row = e / kBitWords, word = e % kBitWords;
    const bool real = row0 + row < s.rows && word0 + word < s.words;
    to[row * kBitRow + word] = real ? seen[(row0 + row) * s.words + word0 + word] : 0u;
  }
}

/// Two BF16 numbers, 0 or 1, of the lowest two bits.
__device__ __forceinline__ uint32_t zeros_and_ones(uint32_t bits) {
  return ((bits & 1u) | (bits & 2u) << 15) * 0x3f80u;
}

}  // namespace

/// Each warp has 32 x 64 of the 128 x 128 sums of a thread block.
template <int D>
__global__ void __launch_bounds__(kThreads, 2)
    matrices_kernel(const __grid_constant__ ComplementJob p) {
  using bf16 = __nv_bfloat16;
  extern __shared__ __align__(128) uint8_t memory[];
  take_turn();
  const Seen& size = p.seen;
  const int64_t row_size = D * D;
  const uint32_t thread = threadIdx.x, lane = thread % 32, warp = thread / 32;
  const int head = static_cast<int>(blockIdx.z), row0 = static_cast<int>(blockIdx.x) * kTile,
            column0 = static_cast<int>(blockIdx.y) * kTile;
  const uint16_t* matrix = reinterpret_cast<const uint16_t*>(p.matrix) +
                           static_cast<int64_t>(head) * size.columns * row_size + column0;
  const auto average_of = [&](int row) {
    return reinterpret_cast<__half*>(p.average) +
           (static_cast<int64_t>(head) * size.rows + row) * row_size + column0;
  };
  const auto inverse_of = [&](int row, int channel) {
    return inverse_or_zero(
        p.sum_of_seen[0][(static_cast<int64_t>(head) * size.rows + row) * D + channel]);
  };

  if (p.bad[head] != 0) {  // 0·NaN is NaN, so summands that are not seen must be left out
    const uint32_t* const seen = seen_of(size, head);
    const int column = static_cast<int>(thread) % kTile;
    for (int row = row0 + static_cast<int>(thread) / kTile; row < min(row0 + kTile, size.rows);
         row += kThreads / kTile) {
      float total = 0.0f;
      for (int i = 0; i < size.columns; ++i)
        if (sees(size, seen, row, i))
          total += static_cast<float>(reinterpret_cast<const bf16*>(matrix)[i * row_size + column]);
      average_of(row)[column] = __half(total * average_scale(p.magnitude[head]) *
                                       inverse_of(row, (column0 + column) / D));
    }
    return;
  }

  const uint32_t stages = arch::shared_address(memory);
  uint32_t* const bits = reinterpret_cast<uint32_t*>(memory + kStages * kStageBytes);
  const uint32_t warp_row = warp / 2 * 32, warp_column = warp % 2 * 64;
  const auto load_stage = [&](int left, int stage) {  // left: summands
    if (left > 0)
      tile::load_rows<kDepth, kTile * 2, kThreads>(stages + stage * kStageBytes, matrix,
                                                   row_size * 2, left, thread);
    matrix += kDepth * row_size;
    arch::cp_async_commit();
  };
#pragma unroll
  for (int s = 0; s < kStages - 1; ++s) load_stage(size.columns - s * kDepth, s);
  float acc[2][8][4] = {};
  const bool works = row0 + static_cast<int>(warp_row) < size.rows;
  int stage = 0;
#pragma unroll 1
  for (int first = 0; first < size.columns; first += kDepth) {
    if (first % (kBitWords * 32) == 0) {
      __syncthreads();  // everybody is done with the bits before
      load_bits(bits, size, head, row0, first, thread);
    }
    arch::cp_async_wait<kStages - 2>();
    __syncthreads();  // the stage is there, and everybody is done with the one before
    load_stage(size.columns - first - (kStages - 1) * kDepth, stage == 0 ? kStages - 1 : stage - 1);
    const uint32_t b_tile = stages + stage * kStageBytes;
    stage = stage == kStages - 1 ? 0 : stage + 1;
    if (!works) continue;
    const uint32_t* const row = bits + (warp_row + lane / 4) * kBitRow + first / 32 % kBitWords;
#pragma unroll
    for (int step = 0; step < kDepth / 16; ++step) {
      // A lane has columns 2·(lane % 4) and the next, and those eight behind.
      const uint32_t shift = step % 2 * 16 + lane % 4 * 2;
      uint32_t a[2][4];
#pragma unroll
      for (int m = 0; m < 2; ++m)
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          const uint32_t word = row[(16 * m + 8 * half) * kBitRow + step / 2] >> shift;
          a[m][half] = zeros_and_ones(word), a[m][2 + half] = zeros_and_ones(word >> 8);
        }
#pragma unroll
      for (int n = 0; n < 8; n += 2) {
        uint32_t b[4];
        tile::load_b_trans<kTile * 2>(b, b_tile + step * 16 * kTile * 2, warp_column / 8 + n, lane);
#pragma unroll
        for (int m = 0; m < 2; ++m) {
          arch::mma_16<bf16>(acc[m][n], a[m], b[0], b[1]);
          arch::mma_16<bf16>(acc[m][n + 1], a[m], b[2], b[3]);
        }
      }
    }
  }
  arch::cp_async_wait<0>();

  const int channel = (column0 + static_cast<int>(warp_column)) / D;  // of φ
  const float scale = average_scale(p.magnitude[head]);
#pragma unroll
  for (int m = 0; m < 2; ++m)
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int row = row0 + static_cast<int>(warp_row + lane / 4) + 16 * m + 8 * half;
      const bool real = row < size.rows;
      const float inverse = real ? inverse_of(row, channel) : 0.0f;
      __half* const to = average_of(row) + warp_column;
#pragma unroll
      for (int n = 0; n < 8; n += 4) {
        uint32_t words[4];
#pragma unroll
        for (int i = 0; i < 4; ++i)
          words[i] = tile::pack_16<__half>(acc[m][n + i][2 * half] * scale * inverse,
                                           acc[m][n + i][2 * half + 1] * scale * inverse);
        tile::store_quad(to + n * 8, words, lane, true, real);
      }
    }
}

namespace {

template <int D>
void launch_for(const Kind& kind, const ComplementJob& job) {
  const Seen& size = job.seen;
  const auto tiles = [](int64_t n, int64_t tile) {
    return static_cast<unsigned>((n + tile - 1) / tile);
  };
  const unsigned heads = static_cast<unsigned>(job.key_heads);
  launch(vectors_kernel<D>, dim3(tiles(size.rows, kVectorRows), heads, job.sum[1] ? 2 : 1),
         kWays * D, 0, job, kind.stream, kind.start);
  const dim3 grid(tiles(size.rows, kTile), tiles(D * D, kTile), heads);
  launch(matrices_kernel<D>, grid, kThreads, kMatricesBytes, job, kind.stream, kind.start);
}

}  // namespace

void launch_complement(const Kind& kind, const ComplementJob& job) {
  if (kind.d == 64)
    launch_for<64>(kind, job);
  else
    launch_for<128>(kind, job);
}

}  // namespace sagebwd::cuda::sla2::linear
