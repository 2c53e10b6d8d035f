// SPDX-License-Identifier: Apache-2.0
// Products of 16-bit operands in shared memory, by the layouts of src/cuda/arch/wgmma.cuh. Each
// thread works out its own sums at once. So nobody sees here whether a wait or a fence is missing,
// nor whether operands in shared memory are overwritten before a product is done.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstddef>
#include <cstdint>

#include "emulator/block.h"

namespace sagebwd::cuda::arch {

inline void wgmma_fence() {}
inline void wgmma_commit() {}
template <int kPending>
void wgmma_wait() {}
template <typename V, size_t kCount>
void settle(V (&)[kCount]) {}

inline uint32_t place_of(uint32_t shared_address) { return (shared_address & 0x3ffff) >> 4; }
constexpr uint32_t places(size_t bytes) { return static_cast<uint32_t>(bytes / 16); }
template <int kRowBytes>
uint64_t operand_at(uint32_t place, size_t bytes = 0) {
  static_assert(kRowBytes == 128);
  return place + places(bytes);
}
template <int kRowBytes>
uint32_t swizzled(uint32_t offset) {
  static_assert(kRowBytes == 128);
  return offset ^ (offset >> 7 & 7) << 4;
}

/// A number of an operand that starts at `place`: rows of 64 numbers, swizzled. The swizzle is one
/// of addresses, so an operand may start in the middle of a row.
template <typename T>
float operand_number(uint64_t place, unsigned row, unsigned column) {
  const auto address =
      swizzled<128>(static_cast<uint32_t>(place) * 16 + row * 128 + column * sizeof(T));
  return static_cast<float>(*static_cast<const T*>(emulator::shared_pointer(address, sizeof(T))));
}

/// c = ±A·B, or added to c: 16 contraction indices. `by_rows`: B has a row for each of them.
template <typename T>
void multiply_16(float (&c)[32], uint64_t a, uint64_t b, bool add, float sign, bool by_rows) {
  const unsigned lane = emulator::thread->lane, warp = emulator::thread->index.x / 32 % 4;
  for (unsigned j = 0; j < 8; ++j)
    for (unsigned r = 0; r < 2; ++r)
      for (unsigned e = 0; e < 2; ++e) {
        const unsigned row = 16 * warp + lane / 4 + 8 * r, column = 8 * j + 2 * (lane % 4) + e;
        float sum = 0.0f;
        for (unsigned k = 0; k < 16; ++k)
          sum += operand_number<T>(a, row, k) *
                 (by_rows ? operand_number<T>(b, k, column) : operand_number<T>(b, column, k));
        float& to = c[4 * j + 2 * r + e];
        to = add ? to + sign * sum : sign * sum;
      }
}
template <typename T>
void wgmma_16(float (&c)[32], uint64_t a, uint64_t b, bool add) {
  multiply_16<T>(c, a, b, add, 1.0f, false);
}
template <typename T>
void wgmma_16_minus(float (&c)[32], uint64_t a, uint64_t b, bool add) {
  multiply_16<T>(c, a, b, add, -1.0f, false);
}
template <typename T>
void wgmma_16_by_rows(float (&c)[32], uint64_t a, uint64_t b, bool add) {
  multiply_16<T>(c, a, b, add, 1.0f, true);
}

}  // namespace sagebwd::cuda::arch
