// SPDX-License-Identifier: Apache-2.0
// Keys and values of every recipe but `paper`: without the centre of their octave
// (numerics/octaves.h), and with a scale of their own; and those keys again as dQ needs them, made
// from the codes.
#pragma once

#include "cuda/sm80/quantize/operands.h"
#include "cuda/sm80/quantize/token_block.cuh"

namespace sagebwd::cuda::sm80 {

/// Eight signed codes as floats.
__device__ __forceinline__ void floats_of(float (&x)[8], uint2 codes) {
#pragma unroll
  for (uint32_t e = 0; e < 8; ++e) {
    // The float 2^23 + 128 + code has the byte code + 128 at its low end.
    const uint32_t bits =
        arch::byte_permute((e < 4 ? codes.x : codes.y) ^ 0x80808080u, 0x4b000000u, 0x7440u | e % 4);
    x[e] = __uint_as_float(bits) - (0x1p23f + 128.0f);
  }
}

/// A lane's channels of a centre: eight of every 32.
template <int D>
struct LaneCentre {
  float scale;
  uint2 codes[D / 32];

  /// `channel`: the lane's first.
  __device__ LaneCentre(const tuned::Centres& from, int64_t row, uint32_t channel, int d)
      : scale(from.scale[row]) {
#pragma unroll
    for (int part = 0; part < D / 32; ++part) {
      const int here = static_cast<int>(channel) + part * 32;
      codes[part] = here < d ? *reinterpret_cast<const uint2*>(from.codes + row * d + here)
                             : make_uint2(0, 0);
    }
  }
  __device__ __forceinline__ void values(float (&x)[8], int part) const {
    floats_of(x, codes[part]);
#pragma unroll
    for (int e = 0; e < 8; ++e) x[e] = __fmul_rn(scale, x[e]);
  }
};

/// Takes the centre off what was made of one of the thread's tokens.
template <typename T, int D>
__device__ void subtract(TokenBlock<T, D>& b, int step, const LaneCentre<D>& centre) {
#pragma unroll
  for (int part = 0; part < D / 32; ++part) {
    float x[8];
    centre.values(x, part);
#pragma unroll
    for (int e = 0; e < 8; ++e) b.made[step][part][e] -= x[e];
  }
}

/// Makes the key of its codes again, scale·codes + centre. Its own lane knows the scale, `scale` is
/// that of this token.
template <typename T, int D>
__device__ void decode(TokenBlock<T, D>& b, int step, const typename TokenBlock<T, D>::Words& codes,
                       float scale, const LaneCentre<D>& centre) {
#pragma unroll
  for (int part = 0; part < D / 32; ++part) {
    float x[8], middle[8];
    floats_of(x, codes[part][step]);
    centre.values(middle, part);
#pragma unroll
    for (int e = 0; e < 8; ++e)
      b.made[step][part][e] = __fadd_rn(__fmul_rn(scale, x[e]), middle[e]);
  }
}

}  // namespace sagebwd::cuda::sm80
