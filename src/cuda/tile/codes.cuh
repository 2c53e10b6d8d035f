// SPDX-License-Identifier: Apache-2.0
// From accumulators to INT8 operands and back.
//
// Integer sums start at kMagic = the bits of 1.5·2^23, so that reinterpreting the sum as FP32
// gives 1.5·2^23 + s exactly for |s| < 2^22: one FADD instead of a conversion. Rounding uses the
// same number the other way round.
//
// Two neighbouring 8-column blocks of an accumulator become one register of an 8-bit A operand
// without moving data between lanes, if the other operand stores each 16 contraction indices in the
// order of `permuted`.
#pragma once

#include "cuda/arch/convert.cuh"
#include "cuda/arch/mma_sync.cuh"
#include "cuda/arch/scalar.cuh"

namespace sagebwd::cuda::tile {

inline constexpr float kMagicFloat = 12582912.0f;  // 1.5·2^23
inline constexpr int kMagic = 0x4B400000;          // its bits

/// Contraction index (0 … 15) stored at position p.
__host__ __device__ constexpr int permuted(int p) {
  return (p >> 2) * 2 + (p & 1) + ((p & 2) << 2);
}

/// The same for accumulators that were turned around with arch::transpose_8x8, pairs of rows g and
/// g + 8 being 16-bit elements.
__host__ __device__ constexpr int turned(int p) { return (p >> 1) + (p & 1) * 8; }

/// Where `permuted` puts index i: its inverse.
__host__ __device__ constexpr int place_of(int i) { return (i & 6) * 2 + (i & 8) / 4 + (i & 1); }

/// Where a channel of the operand that meets turned codes is stored: with this order the four 8-
/// channel blocks of an accumulator give a lane eight neighbouring channels.
__host__ __device__ constexpr int turned_row(int channel) {
  return (channel & ~31) + ((channel >> 1) & 3) * 8 + ((channel >> 3) & 3) * 2 + (channel & 1);
}

using arch::Bytes;

/// First step of a biased integer sum.
template <Bytes kA = Bytes::s8>
__device__ __forceinline__ void start_sum(int (&d)[4], const uint32_t (&a)[4], uint32_t b0,
                                          uint32_t b1) {
  arch::mma_8<kA>(d, a, b0, b1, kMagic, kMagic, kMagic, kMagic);
}

__device__ __forceinline__ float sum_of(int biased) { return __int_as_float(biased) - kMagicFloat; }

/// acc + scale·s takes two instructions, because the start of the integer sum has to come off. Left
/// on, it takes one: scale·(start + s) is added, what a sum of zero would have added is counted
/// beside it, and comes off after kTilesWithStart tiles at the latest. By then a sum is rounded to
/// 4 units of 8 bits times 8 bits or better, a ten-thousandth of what one tile adds to it. Where
/// all sums are zero the result is: counting is the same instruction.
inline constexpr int kTilesWithStart = 8;
__device__ __forceinline__ float add_with_start(int biased, float scale, float acc) {
  return fmaf(__int_as_float(biased), scale, acc);
}
__device__ __forceinline__ float count_start(float scale, float starts) {
  return add_with_start(kMagic, scale, starts);
}

/// scale·s of a biased sum, exact but for one rounding.
__device__ __forceinline__ float scaled_sum(int biased, float scale, float offset) {
  return fmaf(__int_as_float(biased), scale, offset);
}

/// x·inverse rounded to nearest even, as the low byte of the result.
__device__ __forceinline__ uint32_t code(float x, float inverse) {
  return __float_as_uint(fmaf(x, inverse, kMagicFloat));
}

/// Four signed codes as floats. A conversion would take the unit that makes exponentials.
__device__ __forceinline__ void unpack_codes(float (&x)[4], uint32_t codes) {
#pragma unroll
  for (uint32_t e = 0; e < 4; ++e)
    // The float 2^23 + 128 + code has the byte code + 128 at its low end.
    x[e] = __uint_as_float(arch::byte_permute(codes ^ 0x80808080u, 0x4b000000u, 0x7440u | e)) -
           (0x1p23f + 128.0f);
}

/// The same as 16-bit numbers, which hold them exactly.
template <typename T>
__device__ __forceinline__ uint2 widened(uint32_t codes) {
  float x[4];
  unpack_codes(x, codes);
  alignas(8) const T wide[4] = {static_cast<T>(x[0]), static_cast<T>(x[1]), static_cast<T>(x[2]),
                                static_cast<T>(x[3])};
  return *reinterpret_cast<const uint2*>(wide);
}

/// A 4x4 matrix of bytes, a row in each word, transposed.
__device__ __forceinline__ void transpose_4x4(uint32_t (&x)[4]) {
  const uint32_t ab_low = arch::byte_permute(x[0], x[1], 0x5140),
                 cd_low = arch::byte_permute(x[2], x[3], 0x5140),
                 ab_high = arch::byte_permute(x[0], x[1], 0x7362),
                 cd_high = arch::byte_permute(x[2], x[3], 0x7362);
  x[0] = arch::byte_permute(ab_low, cd_low, 0x5410),
  x[1] = arch::byte_permute(ab_low, cd_low, 0x7632);
  x[2] = arch::byte_permute(ab_high, cd_high, 0x5410),
  x[3] = arch::byte_permute(ab_high, cd_high, 0x7632);
}

/// The low bytes of four words.
__device__ __forceinline__ uint32_t pack(uint32_t a, uint32_t b, uint32_t c, uint32_t d) {
  return arch::byte_permute(arch::byte_permute(a, b, 0x0040), arch::byte_permute(c, d, 0x0040),
                            0x5410);
}

/// Four numbers, each times its factor and rounded to nearest even, as the bytes of a word.
/// Newer targets convert and pack in one instruction; NaN is 0 there.
template <Bytes kCode>
__device__ __forceinline__ uint32_t codes_of(float a, float fa, float b, float fb, float c,
                                             float fc, float d, float fd) {
#if __CUDA_ARCH__ >= 860
  return arch::to_bytes<kCode>(a * fa, b * fb, c * fc, d * fd);
#else
  return pack(code(a, fa), code(b, fb), code(c, fc), code(d, fd));
#endif
}

/// Largest value of the four lanes that share a row.
__device__ __forceinline__ float quad_max(float x) {
  x = fmaxf(x, __shfl_xor_sync(0xffffffffu, x, 1));
  return fmaxf(x, __shfl_xor_sync(0xffffffffu, x, 2));
}
__device__ __forceinline__ float quad_sum(float x) {
  x += __shfl_xor_sync(0xffffffffu, x, 1);
  return x + __shfl_xor_sync(0xffffffffu, x, 2);
}

/// A operands (k32 each) of a quantised accumulator tile of 16 rows and 8·kBlocks columns;
/// inverse[r] belongs to row g + 8r.
template <Bytes kCode, int kBlocks>
__device__ __forceinline__ void quantize_rows(uint32_t (&a)[kBlocks / 4][4],
                                              const float (&x)[kBlocks][4], float inverse_low,
                                              float inverse_high) {
#pragma unroll
  for (int b = 0; b < kBlocks; b += 2) {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const float i = r == 0 ? inverse_low : inverse_high;
      a[b / 4][(b & 2) + r] = codes_of<kCode>(x[b][2 * r], i, x[b][2 * r + 1], i, x[b + 1][2 * r],
                                              i, x[b + 1][2 * r + 1], i);
    }
  }
}

}  // namespace sagebwd::cuda::tile
