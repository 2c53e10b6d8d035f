// SPDX-License-Identifier: Apache-2.0
// Σ (weight·φ)ᵀ·b over the tokens of a block, minus its part of the mean of b. A thread block owns
// the matrix [d, d] of a block, in registers, and walks over pieces of tokens, and over some
// blocks. The next x is copied meanwhile; b arrives while φ is made. φ is hi + lo in BF16. An
// eighth of a product more gives the sums of φ: against a column of ones, and one of `extra`.
#include <type_traits>

#include "cuda/arch/mma_sync.cuh"
#include "cuda/arch/scalar.cuh"
#include "cuda/host/launch.h"
#include "cuda/sla2/linear/rows.cuh"
#include "cuda/tile/quad.cuh"

namespace sagebwd::cuda::sla2::linear {
namespace {

using bf16 = __nv_bfloat16;

/// Warps are 2 wide, and have 32 rows each.
template <int D>
struct Shape {
  static constexpr int kWarps = D / 32 * 2, kThreads = kWarps * 32;
  static constexpr int kRowBytes = D * 2, kTile = kPiece * kRowBytes;
  static constexpr int kColumns = D / 2, kBlocks = kColumns / 8;  // of a warp
  struct Shared {
    uint8_t hi[2][kTile];  // x before
    uint8_t lo[kTile];
    uint8_t b[kTile];
    uint16_t partner[3][kPiece];  // ones, and `extra` in two parts
    float x_mean[D];
  };
};

constexpr float kInfinite = 0x1.fcp127f;  // in BF16

__device__ __forceinline__ float split(float x) { return x - static_cast<float>(bf16(x)); }

/// Makes φ of a tile of x. Eight lanes share a row.
template <typename T, int D>
__device__ __forceinline__ void make_features(const BlockSumsJob& p, uint32_t hi, uint32_t lo,
                                              const float* mean, int head, int first) {
  using S = Shape<D>;
  constexpr int kChunks = D / 64, kRows = S::kThreads / 8;
  const int thread = static_cast<int>(arch::thread_index()), slot = thread % 8;
#pragma unroll 1
  for (int row = thread / 8; row < kPiece; row += kRows) {
    const bool real = first + row < p.x.count;
    float x[kChunks][8], most = -FLT_MAX;
#pragma unroll
    for (int i = 0; i < kChunks; ++i) {
      const int chunk = slot + 8 * i;
      const uint32_t at = tile::swizzled<S::kRowBytes>(row, chunk);
      unpack_chunk<T>(x[i], *static_cast<const uint4*>(arch::shared_pointer(hi + at, 16)));
#pragma unroll
      for (int e = 0; e < 8; e += 2) {
        const float2 m = *reinterpret_cast<const float2*>(mean + chunk * 8 + e);
        x[i][e] -= m.x, x[i][e + 1] -= m.y;
      }
#pragma unroll
      for (int e = 0; e < 8; ++e) most = fmaxf(most, x[i][e]);
    }
#pragma unroll
    for (int step = 1; step < 8; step *= 2)
      most = fmaxf(most, __shfl_xor_sync(kAllLanes, most, step));
    float sum = 0.0f;
#pragma unroll
    for (int i = 0; i < kChunks; ++i)
#pragma unroll
      for (int e = 0; e < 8; ++e) {
        x[i][e] = arch::exp2_approx((x[i][e] - most) * kLog2E);
        sum += x[i][e];
      }
#pragma unroll
    for (int step = 1; step < 8; step *= 2) sum += __shfl_xor_sync(kAllLanes, sum, step);
    float factor = 0.0f;
    if (real) {
      factor = 1.0f / sum;
      if (p.weight != nullptr)
        factor *= p.weight[static_cast<int64_t>(head) * p.x.count + first + row];
    }
#pragma unroll
    for (int i = 0; i < kChunks; ++i) {
      float rest[8];
#pragma unroll
      for (int e = 0; e < 8; ++e) {
        x[i][e] = real ? x[i][e] * factor : 0.0f;
        rest[e] = split(x[i][e]);
      }
      const uint32_t at = tile::swizzled<S::kRowBytes>(row, slot + 8 * i);
      *static_cast<uint4*>(arch::shared_pointer(hi + at, 16)) = pack_chunk<bf16>(x[i]);
      *static_cast<uint4*>(arch::shared_pointer(lo + at, 16)) = pack_chunk<bf16>(rest);
    }
  }
}

/// Writes the matrix and the sums of a block.
template <int D>
__device__ __forceinline__ void store_block(const BlockSumsJob& p, int head, int block,
                                            const float (&acc)[2][Shape<D>::kBlocks][4],
                                            const float (&side)[2][4], uint32_t thread) {
  using S = Shape<D>;
  const uint32_t lane = thread % 32, warp = thread / 32;
  const uint32_t row0 = warp / 2 * 32, column0 = warp % 2 * S::kColumns;
  const int64_t at = static_cast<int64_t>(head) * p.blocks + block;
  bf16* const matrix = reinterpret_cast<bf16*>(p.matrix) + at * D * D;
  const float* const mean = p.b_mean + head / p.group * D;
  bool bad = false;
  float largest = 0.0f;  // average
#pragma unroll
  for (int m = 0; m < 2; ++m)
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int row = static_cast<int>(row0 + lane / 4) + 16 * m + 8 * half;
      // Column 0 is in the first lane of the quad, with column 1; column 2 in the next.
      const float first = side[m][2 * half], second = side[m][2 * half + 1];
      const float sum = __shfl_sync(kAllLanes, first, static_cast<int>(lane & ~3u));
      const float low = __shfl_sync(kAllLanes, first, static_cast<int>((lane & ~3u) + 1));
      bad = bad || !(fabsf(first) <= FLT_MAX && fabsf(second) <= FLT_MAX);
      float most = 0.0f;
      if (column0 == 0 && lane % 4 == 0) {
        p.sum[at * D + row] = sum;
        if (p.extra_sum != nullptr) p.extra_sum[at * D + row] = second + low;
      }
#pragma unroll
      for (int n = 0; n < S::kBlocks; n += 4) {
        uint32_t words[4];
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          const int column = static_cast<int>(column0 + lane % 4 * 2) + (n + i) * 8;
          const float2 shift = *reinterpret_cast<const float2*>(mean + column);
          const float x = acc[m][n + i][2 * half] - sum * shift.x,
                      y = acc[m][n + i][2 * half + 1] - sum * shift.y;
          if (fabsf(x) < kInfinite && fabsf(y) < kInfinite)
            most = fmaxf(most, fmaxf(fabsf(x), fabsf(y)));
          else
            bad = true;
          words[i] = tile::pack_16<bf16>(x, y);
        }
        tile::store_quad(matrix + row * D + column0 + n * 8, words, lane, true, true);
      }
      // Not NaN, even if the sum is.
      if (sum > 0.0f) largest = fmaxf(largest, most / sum);
    }
  if (bad) atomicOr(p.bad + head / p.group, 1u);
  // Bits of numbers that are not negative are in the order of these.
  const uint32_t bits = __reduce_max_sync(kAllLanes, __float_as_uint(largest));
  if (lane == 0) atomicMax(reinterpret_cast<uint32_t*>(p.magnitude) + head / p.group, bits);
}

}  // namespace

template <typename T, int D>
__global__ void __launch_bounds__(Shape<D>::kThreads, 512 / Shape<D>::kThreads)
    block_sums_kernel(const __grid_constant__ BlockSumsJob p) {
  using S = Shape<D>;
  extern __shared__ __align__(128) uint8_t memory[];
  take_turn();
  typename S::Shared& shared = *reinterpret_cast<typename S::Shared*>(memory);
  const uint32_t x_tiles = arch::shared_address(shared.hi[0]), lo = arch::shared_address(shared.lo),
                 b_tile = arch::shared_address(shared.b);
  const uint32_t thread = threadIdx.x, lane = thread % 32, warp = thread / 32;
  const uint32_t row0 = warp / 2 * 32, column0 = warp % 2 * S::kColumns;
  const int head = static_cast<int>(blockIdx.y);
  const int first_block = static_cast<int>(blockIdx.x) * p.together;
  const int begin = first_block * p.block,
            end = min(min(first_block + p.together, p.blocks) * p.block, p.x.count);

  for (int c = static_cast<int>(thread); c < D; c += S::kThreads)
    shared.x_mean[c] = p.x_mean == nullptr ? 0.0f : p.x_mean[head / p.group * D + c];

  const auto load_x = [&](int first, int stage) {
    if (first < end)
      load_piece<T, D, S::kThreads>(x_tiles + stage * S::kTile, p.x, head, first, thread);
    arch::cp_async_commit();
  };
  load_x(begin, 0);
  float acc[2][S::kBlocks][4] = {}, side[2][4] = {};
  int stage = 0;
#pragma unroll 1
  for (int first = begin; first < end; first += kPiece, stage ^= 1) {
    const uint32_t hi = x_tiles + stage * S::kTile;
    const int next = first + kPiece;
    arch::cp_async_wait<0>();
    __syncthreads();  // x is there, and everybody is done with the tiles before
    load_piece<T, D, S::kThreads>(b_tile, p.b, head, first, thread);
    arch::cp_async_commit();
    load_x(next, stage ^ 1);
    for (int i = static_cast<int>(thread); i < kPiece; i += S::kThreads) {
      float extra = 0.0f;
      if (p.extra != nullptr && first + i < p.x.count)
        extra = p.extra[static_cast<int64_t>(head) * p.x.count + first + i];
      *reinterpret_cast<bf16*>(&shared.partner[0][i]) = bf16(1.0f);
      *reinterpret_cast<bf16*>(&shared.partner[1][i]) = bf16(extra);
      *reinterpret_cast<bf16*>(&shared.partner[2][i]) = bf16(split(extra));
    }
    make_features<T, D>(p, hi, lo, shared.x_mean, head, first);
    arch::cp_async_wait<1>();
    __syncthreads();
    if constexpr (std::is_same_v<T, __half>) {  // φ has the range of BF16, and so must b
      for (uint32_t i = thread; i < S::kTile / 16; i += S::kThreads) {
        float x[8];
        uint4* const at = reinterpret_cast<uint4*>(shared.b) + i;
        unpack_chunk<T>(x, *at);
        *at = pack_chunk<bf16>(x);
      }
      __syncthreads();
    }
#pragma unroll 1
    for (int step = 0; step < kPiece / 16; ++step) {
      const uint32_t down = step * 16 * S::kRowBytes;
      uint32_t ones[2] = {0, 0};
      if (lane / 4 < 3) {
        const uint16_t* from = &shared.partner[lane / 4][step * 16 + lane % 4 * 2];
        ones[0] = *reinterpret_cast<const uint32_t*>(from);
        ones[1] = *reinterpret_cast<const uint32_t*>(from + 8);
      }
      uint32_t a[2][2][4];  // of hi and lo
#pragma unroll
      for (int m = 0; m < 2; ++m) {
        tile::load_a_trans<S::kRowBytes>(a[0][m], hi + down, row0 / 8 + 2 * m, lane);
        tile::load_a_trans<S::kRowBytes>(a[1][m], lo + down, row0 / 8 + 2 * m, lane);
        arch::mma_16<bf16>(side[m], a[0][m], ones[0], ones[1]);
        arch::mma_16<bf16>(side[m], a[1][m], ones[0], ones[1]);
      }
#pragma unroll
      for (int n = 0; n < S::kBlocks; n += 2) {
        uint32_t b[4];
        tile::load_b_trans<S::kRowBytes>(b, b_tile + down, column0 / 8 + n, lane);
#pragma unroll
        for (int part = 0; part < 2; ++part)
#pragma unroll
          for (int m = 0; m < 2; ++m) {
            arch::mma_16<bf16>(acc[m][n], a[part][m], b[0], b[1]);
            arch::mma_16<bf16>(acc[m][n + 1], a[part][m], b[2], b[3]);
          }
      }
    }
    if (next < end && next % p.block != 0) continue;
    store_block<D>(p, head, first / p.block, acc, side, thread);
#pragma unroll
    for (int m = 0; m < 2; ++m) {
#pragma unroll
      for (int i = 0; i < 4; ++i) side[m][i] = 0.0f;
#pragma unroll
      for (int n = 0; n < S::kBlocks; ++n)
#pragma unroll
        for (int i = 0; i < 4; ++i) acc[m][n][i] = 0.0f;
    }
  }
}

void launch_block_sums(const Kind& kind, const BlockSumsJob& job) {
  const int runs = (job.blocks + job.together - 1) / job.together;
  dispatch(kind, [&](auto type, auto d) {
    using S = Shape<d()>;
    launch(block_sums_kernel<decltype(type), d()>,
           dim3(static_cast<unsigned>(runs), static_cast<unsigned>(job.x.heads)), S::kThreads,
           sizeof(typename S::Shared), job, kind.stream, kind.start);
  });
}

}  // namespace sagebwd::cuda::sla2::linear
