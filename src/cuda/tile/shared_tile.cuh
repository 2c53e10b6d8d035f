// SPDX-License-Identifier: Apache-2.0
// Tiles in shared memory: rows of 64, 128 or 256 bytes whose 16-byte chunks are swizzled so that
// eight rows at the same column touch all banks once, and the ldmatrix addresses of their
// fragments. Fragments start at rows that are multiples of 8, where the swizzle begins anew: their
// addresses are one number per lane plus a constant.
#pragma once

#include "cuda/arch/shared_memory.cuh"

namespace sagebwd::cuda::tile {

/// Byte offset of chunk `chunk` of row `row`.
template <int kRowBytes>
__device__ __forceinline__ uint32_t swizzled(uint32_t row, uint32_t chunk) {
  static_assert(kRowBytes == 64 || kRowBytes == 128 || kRowBytes == 256);
  const uint32_t turn = kRowBytes == 64 ? (row >> 1) & 3 : row & 7;
  return row * kRowBytes + ((chunk ^ turn) << 4);
}

/// Byte offset of the chunk that is `thread`-th in a tile.
template <int kRowBytes>
__device__ __forceinline__ uint32_t chunk_at(uint32_t thread) {
  if constexpr (kRowBytes == 64) return (thread * 16) ^ ((thread * 2) & 0x30);
  if constexpr (kRowBytes == 128) return (thread * 16) ^ ((thread * 2) & 0x70);
  return (thread * 16) ^ (thread & 0x70);
}

/// Starts copying a contiguous tile of kRows rows.
template <int kRows, int kRowBytes, int kThreads>
__device__ __forceinline__ void load_tile(uint32_t to, const void* from, uint32_t thread) {
  constexpr int kChunks = kRowBytes / 16, kTotal = kRows * kChunks;
  static_assert(kThreads / kChunks % 8 == 0, "the swizzle repeats from step to step");
  to += chunk_at<kRowBytes>(thread);
  const char* source = static_cast<const char*>(from) + thread * 16;
#pragma unroll
  for (int i = 0; i < kTotal / kThreads; ++i)
    arch::cp_async_16(to + i * kThreads * 16, source + i * kThreads * 16);
  if constexpr (kTotal % kThreads != 0)
    if (thread < kTotal % kThreads)
      arch::cp_async_16(to + kTotal / kThreads * kThreads * 16,
                        source + kTotal / kThreads * kThreads * 16);
}

/// The same for rows that lie `stride` bytes apart, of which `valid` exist; the others become zero.
template <int kRows, int kRowBytes, int kThreads>
__device__ __forceinline__ void load_rows(uint32_t to, const void* from, int64_t stride, int valid,
                                          uint32_t thread) {
  constexpr int kChunks = kRowBytes / 16, kPerPass = kThreads / kChunks;
  static_assert(kPerPass % 8 == 0 && kRows % kPerPass == 0);
  const int row = static_cast<int>(thread / kChunks);
  to += chunk_at<kRowBytes>(thread);
  const char* source = static_cast<const char*>(from) + row * stride + thread % kChunks * 16;
#pragma unroll
  for (int i = 0; i < kRows / kPerPass; ++i)
    arch::cp_async_16_or_zero(to + i * kThreads * 16, source + i * kPerPass * stride,
                              row + i * kPerPass < valid);
}

/// Starts copying `kBytes` contiguous bytes, a multiple of 16, at most 16 per thread.
template <int kBytes, int kThreads>
__device__ __forceinline__ void load_linear(uint32_t to, const void* from, uint32_t thread) {
  static_assert(kBytes <= 16 * kThreads);
  if (thread < kBytes / 16)
    arch::cp_async_16(to + thread * 16, static_cast<const char*>(from) + thread * 16);
}

/// Fragments of one contraction step of 32 bytes (k32 of bytes, k16 of 16-bit values), for loops
/// that go step by step through all blocks of a tile, so that neighbouring products do not wait for
/// each other. The lane's part of an address is one number, made once; a step changes some of its
/// bits. Tiles start at multiples of 128 bytes.
template <int kRowBytes>
__device__ __forceinline__ uint32_t a_lane(uint32_t lane) {
  return swizzled<kRowBytes>(lane & 15, lane >> 4);
}
template <int kRowBytes>
__device__ __forceinline__ uint32_t b_lane(uint32_t lane) {
  return swizzled<kRowBytes>((lane & 7) + (lane >> 4) * 8, (lane >> 3) & 1);
}
/// `at` = tile + a_lane or b_lane.
__device__ __forceinline__ uint32_t step_of(uint32_t at, int step) {
  return (at ^ ((step & 3) << 5)) + (step >> 2) * 128;
}

/// B operand of a 16-bit tile [k, n] that has the contraction along its rows: rows 0 … 15 of `tile`
/// (one k16 step), 16 columns from chunk `chunk` on: {b0, b1} of two blocks of 8 columns.
template <int kRowBytes>
__device__ __forceinline__ void load_b_trans(uint32_t (&b)[4], uint32_t tile, uint32_t chunk,
                                             uint32_t lane) {
  arch::ldmatrix_x4_trans(
      b, tile + (lane & 8) * kRowBytes + swizzled<kRowBytes>(lane & 7, chunk + (lane >> 4)));
}

/// A operand of a 16-bit tile [k, m], again with the contraction along its rows: rows 0 … 15 of
/// `tile`, 16 columns from chunk `chunk` on.
template <int kRowBytes>
__device__ __forceinline__ void load_a_trans(uint32_t (&a)[4], uint32_t tile, uint32_t chunk,
                                             uint32_t lane) {
  arch::ldmatrix_x4_trans(a, tile + (lane >> 4) * 8 * kRowBytes +
                                 swizzled<kRowBytes>(lane & 7, chunk + ((lane >> 3) & 1)));
}

}  // namespace sagebwd::cuda::tile
