// SPDX-License-Identifier: Apache-2.0
// A block of tokens in registers, in FP32: its product with the rotation, or with the identity
// (matrices.cuh). Sums have an order that the hardware chooses. A token that holds NaN or Inf may
// have them in more channels than before; its codes are 0 anyway.
//
// Four lanes share the rows of a token; each has 16 neighbouring channels of every panel.
#pragma once

#include "cuda/arch/convert.cuh"
#include "cuda/arch/scalar.cuh"
#include "cuda/arch/wgmma.cuh"
#include "cuda/sm90/operand.cuh"
#include "cuda/sm90/quantize/shared.cuh"
#include "cuda/tuned/rows.cuh"

namespace sagebwd::cuda::sm90::codes {

/// Which of the consumers a thread is, and what it has of a block. Asked for with every piece:
/// kept, it would take registers that codes need.
template <int D>
struct Place {
  using S = Shape<D>;
  uint32_t thread = arch::thread_index();
  /// Through a shuffle, so that the compiler knows that a warp agrees on it.
  uint32_t warpgroup = __shfl_sync(0xffffffffu, thread / 128, 0);

  __device__ uint32_t lane() const { return thread % 32; }
  /// The first of the thread's rows.
  __device__ uint32_t first_row() const {
    return thread / 128 * (S::kTiles * 64) + thread % 128 / 32 * 16 + lane() / 4;
  }
  __device__ uint32_t member() const { return thread % 4; }
  /// Row i of the thread, in the block.
  __device__ uint32_t row(uint32_t i) const { return first_row() + i / 2 * 64 + i % 2 * 8; }
  /// A number per token ends up in the lane that owns the token: the one of four that has the
  /// number of the row. With two rows the other two lanes have them as well.
  __device__ uint32_t own_row() const { return row(member() % S::kRows); }
  __device__ bool owns() const { return member() < S::kRows; }
  /// The lane's first channel of a panel.
  __device__ uint32_t channel(int panel) const {
    return static_cast<uint32_t>(panel) * 64 + member() * 16;
  }
};

template <typename T, int D>
struct Values {
  using S = Shape<D>;
  Place<D> place;
  float x[S::kTiles][S::kPanels][32];

  /// The value of row i of the thread in one of its 16 channels of a panel.
  __device__ __forceinline__ float& at(int i, int panel, int channel) {
    return x[i / 2][panel][channel / 2 * 4 + i % 2 * 2 + channel % 2];
  }

  /// The products. One by one: ptxas would put them in a row anyway, with more waits.
  template <bool kRotates>
  __device__ __forceinline__ void multiply(uint32_t stage, uint32_t matrices) {
    const Operand<kRowBytes> tokens{stage + place.warpgroup * arch::places(S::kTiles * kTileBytes),
                                    0},
        matrix{matrices, 0};
#pragma unroll
    for (int tile = 0; tile < S::kTiles; ++tile)
#pragma unroll
      for (int panel = 0; panel < S::kPanels; ++panel) {
        float(&sums)[32] = x[tile][panel];
        arch::wgmma_fence();
#pragma unroll
        for (int from = kRotates ? 0 : panel; from < (kRotates ? S::kPanels : panel + 1); ++from)
#pragma unroll
          for (int step = 0; step < 4; ++step) {
            const uint64_t a = tokens.from_row(from * kBlock + tile * 64).step(step),
                           b = matrix.from_row((kRotates ? from : S::kPanels) * 64).step(step);
            const bool add = step > 0 || (kRotates && from > 0);
            if (kRotates && from == 1 && panel == 1)
              arch::wgmma_16_minus<T>(sums, a, b, add);
            else
              arch::wgmma_16<T>(sums, a, b, add);
          }
        arch::wgmma_commit();
        arch::wgmma_wait<0>();
        arch::settle(sums);
      }
  }

  /// Each value times `unit`, minus the centre of its channel.
  __device__ __forceinline__ void subtract(const float* centre, float unit) {
#pragma unroll
    for (int panel = 0; panel < S::kPanels; ++panel) {
      const auto* from = reinterpret_cast<const float4*>(centre + place.channel(panel));
#pragma unroll
      for (int c = 0; c < 16; c += 4) {
        const float4 m = from[c / 4];
        const float four[4] = {m.x, m.y, m.z, m.w};
#pragma unroll
        for (int i = 0; i < S::kRows; ++i)
#pragma unroll
          for (int e = 0; e < 4; ++e)
            at(i, panel, c + e) = fmaf(at(i, panel, c + e), unit, -four[e]);
      }
    }
  }
  /// The largest magnitude of the token that this lane owns. NaN stays NaN.
  __device__ __forceinline__ float own_top() {
    float top[S::kRows];
#pragma unroll
    for (int i = 0; i < S::kRows; ++i) {
      top[i] = fabsf(at(i, 0, 0));
#pragma unroll
      for (int panel = 0; panel < S::kPanels; ++panel)
#pragma unroll
        for (int c = panel == 0 ? 1 : 0; c < 16; ++c)
          top[i] = arch::max_nan(top[i], fabsf(at(i, panel, c)));
    }
    return tuned::scatter_reduce<4>(top, place.member(),
                                    [](float a, float b) { return arch::max_nan(a, b); });
  }

  /// The lane's 16 codes of a row and panel. NaN, which Inf·0 is, becomes 0.
  __device__ __forceinline__ uint4 codes(int i, int panel, float inverse) {
    uint32_t word[4];
#pragma unroll
    for (int w = 0; w < 4; ++w)
      word[w] = arch::to_bytes<arch::Bytes::s8>(
          __fmul_rn(at(i, panel, 4 * w), inverse), __fmul_rn(at(i, panel, 4 * w + 1), inverse),
          __fmul_rn(at(i, panel, 4 * w + 2), inverse), __fmul_rn(at(i, panel, 4 * w + 3), inverse));
    return make_uint4(word[0], word[1], word[2], word[3]);
  }
};

}  // namespace sagebwd::cuda::sm90::codes
