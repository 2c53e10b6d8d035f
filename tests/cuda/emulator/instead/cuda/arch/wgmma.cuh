// SPDX-License-Identifier: Apache-2.0
// Products of a warpgroup, by the layouts of src/cuda/arch/wgmma.cuh (emulator/products.h).
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstddef>
#include <cstdint>
#include <type_traits>

#include "cuda/arch/mma_sync.cuh"
#include "cuda/arch/shared_memory.cuh"
#include "emulator/products.h"

namespace sagebwd::cuda::arch {

inline void wgmma_fence() { emulator::product_fence(); }
inline void wgmma_commit() { emulator::commit_products(); }
template <int kPending>
void wgmma_wait() {
  emulator::wait_for_products(kPending);
}
template <typename V, size_t kCount>
void settle(V (&)[kCount]) {}

inline uint32_t place_of(uint32_t shared_address) { return (shared_address & 0x3ffff) >> 4; }
constexpr uint32_t places(size_t bytes) { return static_cast<uint32_t>(bytes / 16); }
template <int kRowBytes>
uint64_t operand_at(uint32_t place, size_t bytes = 0) {
  static_assert(kRowBytes == 64 || kRowBytes == 128);
  constexpr uint64_t kEightRows = 8 * kRowBytes / 16, kSwizzle = kRowBytes == 128 ? 1 : 2;
  return (place + (places(bytes) | 1u << 16)) | (kEightRows | kSwizzle << 30) << 32;
}
template <int kRowBytes>
uint32_t swizzled(uint32_t offset) {
  static_assert(kRowBytes == 64 || kRowBytes == 128);
  return offset ^ (offset >> 7 & (kRowBytes == 128 ? 7 : 3)) << 4;
}

// Both operands in shared memory.
template <int kCount>
void wgmma_8(int (&c)[kCount], uint64_t a, uint64_t b, bool add) {
  static_assert(kCount == 64 || kCount == 32);
  emulator::issue({c, kCount, nullptr, a, b, add, emulator::Element::s8, false});
}
template <typename T>
inline constexpr emulator::Element kElementOf =
    std::is_same_v<T, __nv_bfloat16> ? emulator::Element::bf16 : emulator::Element::f16;
template <typename T>
void wgmma_16(float (&c)[32], uint64_t a, uint64_t b, bool add) {
  emulator::issue({c, 32, nullptr, a, b, add, kElementOf<T>, false});
}
template <typename T>
void wgmma_16_minus(float (&c)[32], uint64_t a, uint64_t b, bool add) {
  emulator::issue({c, 32, nullptr, a, b, add, kElementOf<T>, true});
}
// A in registers.
inline void wgmma_bf16(float (&c)[32], const uint32_t* a, uint64_t b, bool add) {
  emulator::issue({c, 32, a, 0, b, add, emulator::Element::bf16, false});
}
inline void wgmma_u8(int (&c)[32], const uint32_t* a, uint64_t b, bool add) {
  emulator::issue({c, 32, a, 0, b, add, emulator::Element::u8, false});
}
template <int kCount>
void wgmma_s8(int (&c)[kCount], const uint32_t* a, uint64_t b, bool add) {
  static_assert(kCount == 32 || kCount == 16);
  emulator::issue({c, kCount, a, 0, b, add, emulator::Element::s8, false});
}

/// Registers are many here.
template <int kRegisters>
void take_registers() {
  static_assert(kRegisters % 8 == 0 && kRegisters >= 24 && kRegisters <= 256);
}
template <int kRegisters>
void leave_registers() {
  take_registers<kRegisters>();
}

}  // namespace sagebwd::cuda::arch
