// SPDX-License-Identifier: Apache-2.0
// The matrix products of src/cuda/arch/mma_sync.cuh, written from its table of registers: gather
// the operands of all lanes, multiply, hand the sums back.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>
#include <cstring>

#include "emulator/block.h"

namespace sagebwd::cuda::arch {

enum class Bytes { s8, u8 };

/// One lane's registers. Elements are bytes or 16-bit values, kPer of them in a register.
template <typename Sum>
struct MmaRegisters {
  const uint32_t* a;  // [4]
  uint32_t b[2];
  Sum* d;  // [4]
};

/// d += a·b of a warp; `A` and `B` are the elements as stored, `Value` what is multiplied.
template <typename A, typename B, typename Value, typename Sum>
void multiply(emulator::Lanes<MmaRegisters<Sum>> all) {
  constexpr unsigned kPer = 4 / sizeof(A), kHalf = 4 * kPer, kDepth = 2 * kHalf;
  Value a[16][kDepth], b[8][kDepth];
  for (unsigned lane = 0; lane < emulator::kLanes; ++lane) {
    const unsigned g = lane / 4, at = lane % 4 * kPer;
    for (unsigned r = 0; r < 4; ++r) {
      A x[kPer];
      std::memcpy(x, &all[lane].a[r], 4);
      for (unsigned i = 0; i < kPer; ++i)
        a[g + 8 * (r & 1)][kHalf * (r >> 1) + at + i] = static_cast<Value>(x[i]);
    }
    for (unsigned r = 0; r < 2; ++r) {
      B x[kPer];
      std::memcpy(x, &all[lane].b[r], 4);
      for (unsigned i = 0; i < kPer; ++i) b[g][kHalf * r + at + i] = static_cast<Value>(x[i]);
    }
  }
  for (unsigned row = 0; row < 16; ++row)
    for (unsigned col = 0; col < 8; ++col) {
      Sum sum = 0;
      for (unsigned k = 0; k < kDepth; ++k) sum += a[row][k] * b[col][k];
      all[row % 8 * 4 + col / 2].d[row / 8 * 2 + col % 2] += sum;
    }
}

template <Bytes kA = Bytes::s8>
void mma_8(int (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
  using Byte = std::conditional_t<kA == Bytes::u8, uint8_t, int8_t>;
  MmaRegisters<int> mine{a, {b0, b1}, d};
  emulator::meet(mine, multiply<Byte, int8_t, int16_t, int>);
}

template <Bytes kA = Bytes::s8>
void mma_8(int (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1, int c0, int c1, int c2,
           int c3) {
  d[0] = c0, d[1] = c1, d[2] = c2, d[3] = c3;
  mma_8<kA>(d, a, b0, b1);
}

template <typename T>
void mma_16(float (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
  MmaRegisters<float> mine{a, {b0, b1}, d};
  emulator::meet(mine, multiply<T, T, float, float>);
}

}  // namespace sagebwd::cuda::arch
