// SPDX-License-Identifier: Apache-2.0
// What the kernels that own tokens share. A thread block has kPiece tokens of a head, 16 a warp,
// and the matrix of averages of their block in shared memory. A lane has numbers of two rows, lane
// / 4 and that plus 8, in the order of accumulators (arch/mma_sync.cuh), which is that of A
// operands too: value[n][2·half + i] is channel 8n + 2·(lane % 4) + i of row 8·half.
#pragma once

#include <type_traits>

#include "cuda/arch/mma_sync.cuh"
#include "cuda/arch/scalar.cuh"
#include "cuda/host/launch.h"
#include "cuda/sla2/linear/rows.cuh"
#include "cuda/tile/quad.cuh"

namespace sagebwd::cuda::sla2::linear {

inline constexpr int kTokenThreads = kPiece / 16 * 32;

template <int D>
struct TokenShared {
  uint8_t average[D * D * 2];
  uint8_t x[kPiece * D * 2];
  float sum[D], mean[D], x_mean[D], partner_mean[D], extra_sum[D];
  uint8_t partner[kPiece * D * 2];  // not in a forward without a mix
};

template <int D>
using Fragment = float[D / 8][4];

/// The place of a thread, and what belongs to its tokens.
template <typename T, int D>
struct TokenBlock {
  static constexpr int kRowBytes = D * 2;
  TokenShared<D>& shared;
  uint32_t lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  int head = static_cast<int>(blockIdx.y), first = static_cast<int>(blockIdx.x) * kPiece;
  int key_head;
  int64_t block;  // of all heads
  float scale;    // of the averages

  __device__ TokenBlock(uint8_t* memory, const Tables& t)
      : shared(*reinterpret_cast<TokenShared<D>*>(memory)),
        key_head(head / t.group),
        block(static_cast<int64_t>(head) * t.blocks + first / t.block),
        scale(1.0f / average_scale(t.magnitude[key_head])) {
    copy(shared.sum, t.sum + block * D);
    copy(shared.mean, t.mean + key_head * D);
  }
  /// Starts copying tokens, and behind them the averages and the partners of tokens, which are
  /// needed later. Waits for the tokens.
  __device__ __forceinline__ void load(const Tables& t, const Tokens& x, const Tokens* partner) {
    load_piece<T, D, kTokenThreads>(arch::shared_address(shared.x), x, head, first, threadIdx.x);
    arch::cp_async_commit();
    tile::load_tile<D, kRowBytes, kTokenThreads>(arch::shared_address(shared.average),
                                                 t.average + block * D * D, threadIdx.x);
    if (partner != nullptr)
      load_piece<T, D, kTokenThreads>(arch::shared_address(shared.partner), *partner, head, first,
                                      threadIdx.x);
    arch::cp_async_commit();
    arch::cp_async_wait<1>();
    __syncthreads();
  }
  __device__ __forceinline__ void wait_for_averages() const {
    arch::cp_async_wait<0>();
    __syncthreads();
  }
  /// Starts copying other rows of tokens over x. Everybody must be done with x.
  __device__ __forceinline__ void load_over_x(const Tokens& t) const {
    load_piece<T, D, kTokenThreads>(arch::shared_address(shared.x), t, head, first, threadIdx.x);
    arch::cp_async_commit();
  }
  /// Waits for load_over_x, and adds what it has copied.
  __device__ __forceinline__ void add_x(Fragment<D>& to) const {
    arch::cp_async_wait<0>();
    __syncthreads();
    for_words(shared.x, [&](int n, int half, uint32_t word) {
      const float2 x = unpack_16<T>(word);
      to[n][2 * half] += x.x, to[n][2 * half + 1] += x.y;
    });
  }
  /// Null: zeros.
  __device__ void copy(float (&to)[D], const float* from) const {
    for (int c = static_cast<int>(threadIdx.x); c < D; c += kTokenThreads)
      to[c] = from == nullptr ? 0.0f : from[c];
  }

  __device__ int token(int half) const {
    return first + static_cast<int>(warp * 16 + lane / 4) + 8 * half;
  }
  /// The lane's two channels of every eight.
  __device__ int channel(int n) const { return 8 * n + static_cast<int>(lane % 4) * 2; }
  __device__ float2 channels_of(const float (&x)[D], int n) const {
    return *reinterpret_cast<const float2*>(x + channel(n));
  }

  /// f(n, half, words) for the warp's rows of a tile: channels n and n + 1 in eights.
  template <typename F>
  __device__ __forceinline__ void for_words(const uint8_t* rows, F&& f) const {
    const uint32_t at =
        arch::shared_address(rows) + warp * 16 * kRowBytes + tile::a_lane<kRowBytes>(lane);
#pragma unroll
    for (int step = 0; step < D / 16; ++step) {
      uint32_t words[4];
      arch::ldmatrix_x4(words, tile::step_of(at, step));
#pragma unroll
      for (int r = 0; r < 4; ++r) f(2 * step + r / 2, r % 2, words[r]);
    }
  }

  /// φ of the rows of x.
  __device__ __forceinline__ void features(Fragment<D>& phi) const {
    float most[2] = {-FLT_MAX, -FLT_MAX};
    for_words(shared.x, [&](int n, int half, uint32_t word) {
      const float2 x = unpack_16<T>(word), mean = channels_of(shared.x_mean, n);
      phi[n][2 * half] = x.x - mean.x, phi[n][2 * half + 1] = x.y - mean.y;
      most[half] = fmaxf(most[half], fmaxf(phi[n][2 * half], phi[n][2 * half + 1]));
    });
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const float largest = quad_max(most[half]);
      float sum = 0.0f;
#pragma unroll
      for (int n = 0; n < D / 8; ++n)
#pragma unroll
        for (int i = 2 * half; i < 2 * half + 2; ++i) {
          phi[n][i] = arch::exp2_approx((phi[n][i] - largest) * kLog2E);
          sum += phi[n][i];
        }
      const float inverse = 1.0f / quad_sum(sum);
#pragma unroll
      for (int n = 0; n < D / 8; ++n) phi[n][2 * half] *= inverse, phi[n][2 * half + 1] *= inverse;
    }
  }

  /// φ times the sums of the block: the norms.
  __device__ __forceinline__ void norms(float (&norm)[2], const Fragment<D>& phi) const {
    norm[0] = norm[1] = 0.0f;
#pragma unroll
    for (int n = 0; n < D / 8; ++n) {
      const float2 sum = channels_of(shared.sum, n);
      norm[0] += phi[n][0] * sum.x + phi[n][1] * sum.y;
      norm[1] += phi[n][2] * sum.x + phi[n][3] * sum.y;
    }
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      norm[half] = quad_sum(norm[half]);
      if (norm[half] < FLT_MIN) norm[half] = 0.0f;
    }
  }

  /// φ∘sum / norm times the averages, not yet times `scale`.
  __device__ __forceinline__ void average_of(Fragment<D>& to, const Fragment<D>& phi,
                                             const float (&inverse)[2]) const {
    const uint32_t matrix = arch::shared_address(shared.average);
#pragma unroll
    for (int step = 0; step < D / 16; ++step) {
      uint32_t a[4];
#pragma unroll
      for (int r = 0; r < 4; ++r) {
        const int n = 2 * step + r / 2, half = r % 2;
        const float2 sum = channels_of(shared.sum, n);
        a[r] = tile::pack_16<__half>(phi[n][2 * half] * sum.x * inverse[half],
                                     phi[n][2 * half + 1] * sum.y * inverse[half]);
      }
#pragma unroll
      for (int n = 0; n < D / 8; n += 2) {
        uint32_t b[4];
        tile::load_b_trans<kRowBytes>(b, matrix + step * 16 * kRowBytes, n, lane);
        arch::mma_16<__half>(to[n], a, b[0], b[1]);
        arch::mma_16<__half>(to[n + 1], a, b[2], b[3]);
      }
    }
  }

  /// The rows of `partner` times the averages: numbers per channel of φ. Rows are scaled by powers
  /// of two, so that FP16 holds them. `dot`: the rows times the mean.
  __device__ __forceinline__ void against_averages(Fragment<D>& to, float (&dot)[2]) const {
    float most[2] = {0.0f, 0.0f};
    dot[0] = dot[1] = 0.0f;
    for_words(shared.partner, [&](int n, int half, uint32_t word) {
      const float2 x = unpack_16<T>(word), shift = channels_of(shared.partner_mean, n),
                   mean = channels_of(shared.mean, n);
      const float low = x.x - shift.x, high = x.y - shift.y;
      most[half] = fmaxf(most[half], fmaxf(fabsf(low), fabsf(high)));
      dot[half] += low * mean.x + high * mean.y;
    });
    float magnitude[2];
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      magnitude[half] = power_below(quad_max(most[half])) * 0x1p-10f;
      dot[half] = quad_sum(dot[half]);
    }
    const float inverse[2] = {1.0f / magnitude[0], 1.0f / magnitude[1]};
    const uint32_t rows = arch::shared_address(shared.partner) + warp * 16 * kRowBytes +
                          tile::a_lane<kRowBytes>(lane),
                   matrix = arch::shared_address(shared.average) + tile::b_lane<kRowBytes>(lane);
#pragma unroll 1
    for (int step = 0; step < D / 16; ++step) {
      uint32_t a[4];
      arch::ldmatrix_x4(a, tile::step_of(rows, step));
#pragma unroll
      for (int r = 0; r < 4; ++r) {
        const float2 x = unpack_16<T>(a[r]),
                     shift = channels_of(shared.partner_mean, 2 * step + r / 2);
        a[r] = tile::pack_16<__half>((x.x - shift.x) * inverse[r % 2],
                                     (x.y - shift.y) * inverse[r % 2]);
      }
#pragma unroll
      for (int n = 0; n < D / 8; n += 2) {
        uint32_t b[4];
        arch::ldmatrix_x4(b, tile::step_of(matrix + n * 8 * kRowBytes, step));
        arch::mma_16<__half>(to[n], a, b[0], b[1]);
        arch::mma_16<__half>(to[n + 1], a, b[2], b[3]);
      }
    }
#pragma unroll
    for (int n = 0; n < D / 8; ++n)
#pragma unroll
      for (int i = 0; i < 4; ++i) to[n][i] *= scale * magnitude[i / 2];
  }

  /// Writes rows of a result.
  __device__ __forceinline__ void store(const Strided& to, const Tokens& t,
                                        const Fragment<D>& x) const {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const bool real = token(half) < t.count;
      T* const row = row_of<T>(to, t, head, token(half));
#pragma unroll
      for (int n = 0; n < D / 8; n += 4) {
        uint32_t words[4];
#pragma unroll
        for (int i = 0; i < 4; ++i)
          words[i] = tile::pack_16<T>(x[n + i][2 * half], x[n + i][2 * half + 1]);
        tile::store_quad(row + n * 8, words, lane, to.vector, real);
      }
    }
  }
};

/// dispatch(), and whether there is a mix.
template <typename F>
void dispatch_mixed(const Kind& kind, bool mixed, F&& f) {
  dispatch(kind, [&](auto type, auto d) {
    if (mixed)
      f(type, d, std::true_type{});
    else
      f(type, d, std::false_type{});
  });
}

inline dim3 grid_of(const Tokens& t) {
  return dim3(static_cast<unsigned>((t.count + kPiece - 1) / kPiece),
              static_cast<unsigned>(t.heads));
}

}  // namespace sagebwd::cuda::sla2::linear
