// SPDX-License-Identifier: Apache-2.0
// Products of blocks: 64 lines by 64 lines, with the operands brought into shared memory piece by
// piece. Eight warps share the result: warp w has 16 lines of the left and 32 of the right operand.
#pragma once

#include "cuda/arch/mma_sync.cuh"
#include "cuda/arch/mma_tf32.cuh"
#include "cuda/arch/scalar.cuh"
#include "cuda/plain/params.h"

namespace sagebwd::cuda::plain {

inline constexpr int kThreads = 256;

/// threadIdx.x, read again at every call. What follows from it then need not stay in registers
/// through the loops over tiles, which have none to spare.
__device__ __forceinline__ int thread_index() {
  const int i = static_cast<int>(arch::thread_index());
  __builtin_assume(i >= 0 && i < kThreads);
  return i;
}

/// A thread's share of a 64 x 64 result: element [f][2r + e] is line row(r) of the left operand and
/// line col(f, e) of the right one.
template <typename T>
using Fragment = T[4][4];

/// Where that share lies.
struct Position {
  __device__ __forceinline__ Position() {
    const int i = thread_index();
    warp_row = i / 32 % 4, warp_col = i / 128, g = i % 32 / 4, t = i % 4;
  }
  __device__ int row(int r) const { return warp_row * 16 + g + 8 * r; }
  __device__ int col(int f, int e) const { return warp_col * 32 + 8 * f + 2 * t + e; }
  int warp_row, warp_col, g, t;
};

/// f(element, r, row(r), column) for each of a thread's elements.
template <typename T, typename F>
__device__ __forceinline__ void for_elements(Fragment<T>& x, F&& f) {
  const Position at;
#pragma unroll
  for (int b = 0; b < 4; ++b)
#pragma unroll
    for (int r = 0; r < 2; ++r)
#pragma unroll
      for (int e = 0; e < 2; ++e) f(x[b][2 * r + e], r, at.row(r), at.col(b, e));
}

template <typename T>
__device__ __forceinline__ void clear(Fragment<T>& x) {
#pragma unroll
  for (int b = 0; b < 4; ++b)
#pragma unroll
    for (int e = 0; e < 4; ++e) x[b][e] = 0;
}

// Distances between lines in shared memory, chosen so that the loads of a warp spread over all
// banks.
inline constexpr int kCodeChannels = 128;             // per piece of a product along channels
inline constexpr int kCodeLine = kCodeChannels + 16;  // bytes
inline constexpr int kTokenLine = kBlock + 16;        // bytes; codes along tokens
inline constexpr int kChannels = 64;                  // per piece of a product of values
inline constexpr int kValueLine = kChannels + 4;      // floats; product along channels
inline constexpr int kChannelLine = kChannels + 8;    // floats; product along tokens
inline constexpr int kWeightLine = kBlock + 4;        // floats
inline constexpr int kResultChannels = 128;           // of a thread block
inline constexpr int kStagingBytes = 2 * kBlock * kCodeLine;
static_assert(kStagingBytes >= kBlock * kValueLine * 4 &&
              kStagingBytes >= kBlock * kChannelLine * 4 &&
              kStagingBytes >= kResultChannels * kTokenLine && kWeightLine == kValueLine);

struct BlockShared {
  alignas(16) unsigned char staging[kStagingBytes];
  union {  // the left operand of a product along tokens, or the right one of a product of values
    alignas(16) float weights[kBlock * kWeightLine];
    int8_t codes[kBlock * kTokenLine];
  };
  __device__ int8_t* left_codes() { return reinterpret_cast<int8_t*>(staging); }
  __device__ int8_t* right_codes() { return left_codes() + kBlock * kCodeLine; }
  __device__ float* left_values() { return reinterpret_cast<float*>(staging); }
  __device__ float* right_values() { return weights; }
};

/// A block of tokens in a row-major array: `rows` of them exist, the rest count as zero.
template <typename T>
struct Rows {
  const T* data;
  int rows, pitch;
};

/// 16 bytes of a row; zero where there is none.
template <typename T>
__device__ __forceinline__ uint4 load_piece(const Rows<T>& x, int row, int c) {
  if (row < x.rows && c < x.pitch)
    return *reinterpret_cast<const uint4*>(x.data + row * x.pitch + c);
  return make_uint4(0, 0, 0, 0);
}

/// Copies kWidth channels, from c0 on, of a block of tokens to lines of kLine elements.
template <int kWidth, int kLine, typename T>
__device__ __forceinline__ void stage(T* to, const Rows<T>& x, int c0) {
  constexpr int kPiece = 16 / sizeof(T), kPieces = kWidth / kPiece;  // elements; per row
  constexpr int kCount = kBlock * kPieces / kThreads;
  const int row = thread_index() / kPieces, c = thread_index() % kPieces * kPiece;
  uint4 bits[kCount];  // all loads first: one wait instead of several
#pragma unroll
  for (int n = 0; n < kCount; ++n) bits[n] = load_piece(x, row + n * (kThreads / kPieces), c0 + c);
#pragma unroll
  for (int n = 0; n < kCount; ++n)
    *reinterpret_cast<uint4*>(to + (row + n * (kThreads / kPieces)) * kLine + c) = bits[n];
}

/// The same from codes to floats.
template <int kWidth, int kLine>
__device__ __forceinline__ void stage(float* to, const Rows<int8_t>& x, int c0) {
  constexpr int kPieces = kWidth / 16;  // per row
  static_assert(kBlock * kPieces == kThreads && kLine % 4 == 0);
  const int row = thread_index() / kPieces, c = thread_index() % kPieces * 16;
  const uint4 bits = load_piece(x, row, c0 + c);
  const uint32_t word[4] = {bits.x, bits.y, bits.z, bits.w};
#pragma unroll
  for (int n = 0; n < 4; ++n) {
    const auto value = [&](int e) {
      return static_cast<float>(static_cast<int8_t>(word[n] >> 8 * e));
    };
    *reinterpret_cast<float4*>(to + row * kLine + c + 4 * n) =
        make_float4(value(0), value(1), value(2), value(3));
  }
}

/// Copies channels c0 … c0 + 63 of a block of codes, a line per channel.
__device__ inline void stage_transposed_codes(int8_t* to, const Rows<int8_t>& x, int c0) {
  // Each thread turns four tokens by four channels.
  const int i = thread_index();
  static_assert(kThreads == kBlock / 4 * (kChannels / 4));
  const int row = i / 4 % 16 * 4, c = (i % 4 + i / 64 * 4) * 4;
  uint32_t in[4];
#pragma unroll
  for (int r = 0; r < 4; ++r)
    in[r] = row + r < x.rows && c0 + c < x.pitch
                ? *reinterpret_cast<const uint32_t*>(x.data + (row + r) * x.pitch + c0 + c)
                : 0u;
  const uint32_t low01 = __byte_perm(in[0], in[1], 0x5140),
                 low23 = __byte_perm(in[2], in[3], 0x5140),
                 high01 = __byte_perm(in[0], in[1], 0x7362),
                 high23 = __byte_perm(in[2], in[3], 0x7362);
  const uint32_t out[4] = {__byte_perm(low01, low23, 0x5410), __byte_perm(low01, low23, 0x7632),
                           __byte_perm(high01, high23, 0x5410),
                           __byte_perm(high01, high23, 0x7632)};
#pragma unroll
  for (int e = 0; e < 4; ++e)
    *reinterpret_cast<uint32_t*>(to + (c + e) * kTokenLine + row) = out[e];
}

/// sum += left·right over `steps` times 32 codes; lines of both are `line` bytes apart.
template <arch::Bytes kLeft = arch::Bytes::s8>
__device__ __forceinline__ void multiply_codes(Fragment<int>& sum, const int8_t* left,
                                               const int8_t* right, int line, int steps) {
  const Position at;
  const auto word = [](const int8_t* p) { return *reinterpret_cast<const uint32_t*>(p); };
#pragma unroll 1
  for (int k = 4 * at.t; k < 32 * steps; k += 32) {
    const int8_t *low = left + at.row(0) * line + k, *high = left + at.row(1) * line + k;
    const uint32_t a[4] = {word(low), word(high), word(low + 16), word(high + 16)};
#pragma unroll
    for (int b = 0; b < 4; ++b) {
      const int8_t* column = right + (at.warp_col * 32 + 8 * b + at.g) * line + k;
      arch::mma_8<kLeft>(sum[b], a, word(column), word(column + 16));
    }
  }
}

/// Element (line n, index k) of a right operand of floats.
struct RightValues {
  const float* data;
  int line, step;
  __device__ __forceinline__ float operator()(int n, int k) const {
    return data[n * line + k * step];
  }
};

/// sum += left·right over `depth` values. kExact: the values are TF32 numbers. Else each is split
/// into two, which gives nearly the precision of FP32.
template <bool kExact>
__device__ __forceinline__ void multiply_values(Fragment<float>& sum, const float* left,
                                                int left_line, const RightValues& right,
                                                int depth) {
  const Position at;
#pragma unroll 1
  for (int k = at.t; k < depth; k += 8) {
    const float *low = left + at.row(0) * left_line + k, *high = left + at.row(1) * left_line + k;
    const float a[4] = {low[0], high[0], low[4], high[4]};
    uint32_t a_high[4], a_low[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const arch::Tf32Pair x = arch::split_tf32(a[i]);
      a_high[i] = x.high, a_low[i] = x.low;
    }
#pragma unroll
    for (int b = 0; b < 4; ++b) {
      const int n = at.warp_col * 32 + 8 * b + at.g;
      const arch::Tf32Pair b0 = arch::split_tf32(right(n, k)),
                           b1 = arch::split_tf32(right(n, k + 4));
      if constexpr (!kExact) {
        arch::mma_tf32(sum[b], a_low, b0.high, b1.high);
        arch::mma_tf32(sum[b], a_high, b0.low, b1.low);
      }
      arch::mma_tf32(sum[b], a_high, b0.high, b1.high);
    }
  }
}

/// The same, one product at a time and only where seen(row, k): for operands that hold NaN or Inf,
/// which must not reach rows that the mask hides them from.
template <typename F>
__device__ void multiply_poisoned(Fragment<float>& sum, const float* left, int left_line,
                                  const RightValues& right, int depth, F&& seen) {
#pragma unroll 1
  for (int k = 0; k < depth; ++k)
    for_elements(sum, [&](float& to, int, int row, int col) {
      if (seen(row, k)) to += left[row * left_line + k] * right(col, k);
    });
}

}  // namespace sagebwd::cuda::plain
