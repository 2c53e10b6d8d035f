// SPDX-License-Identifier: Apache-2.0
// Products of a warpgroup: 64 rows of A times N columns of B, asynchronously.
//
// A thread holds of the sums: element 4·j + 2·r + e is row 16·warp + lane/4 + 8·r, column
// 8·j + 2·(lane % 4) + e. Operands in shared memory are given by descriptors. An A operand in
// registers has the layout of mma.sync's, a warp having 16 of the rows.
//
// Nothing may touch sums, or an A operand in registers, between issue and wait. The compiler does
// not know that: `settle` tells it.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstddef>
#include <cstdint>
#include <type_traits>

#include "cuda/arch/mma_sync.cuh"
#include "cuda/arch/shared_memory.cuh"

namespace sagebwd::cuda::arch {

/// What was written to registers before is seen by the products issued from here on.
__device__ __forceinline__ void wgmma_fence() {
  asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
}
__device__ __forceinline__ void wgmma_commit() {
  asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
}
/// Waits until at most kPending of the newest groups are under way.
template <int kPending>
__device__ __forceinline__ void wgmma_wait() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(kPending) : "memory");
}

/// Registers that a product writes or reads: nothing that uses them moves across this line.
template <typename V, size_t kCount>
__device__ __forceinline__ void settle(V (&x)[kCount]) {
#pragma unroll
  for (size_t i = 0; i < kCount; ++i) {
    if constexpr (std::is_same_v<V, float>)
      asm volatile("" : "+f"(x[i])::"memory");
    else
      asm volatile("" : "+r"(x[i])::"memory");
  }
}

/// Places of operands in shared memory count in units of 16 bytes. A kernel asks once for the place
/// of its shared memory; additions make all others of it.
__device__ __forceinline__ uint32_t place_of(uint32_t shared_address) {
  return (shared_address & 0x3ffff) >> 4;
}
__host__ __device__ constexpr uint32_t places(size_t bytes) {
  return static_cast<uint32_t>(bytes / 16);
}
/// Describes an operand whose rows have kRowBytes bytes, 64 or 128, and lie behind one another,
/// swizzled over as many bytes. It is `bytes` behind `place`, and starts at a multiple of 1024
/// bytes, or 32 bytes times a step of the product further.
template <int kRowBytes>
__device__ __forceinline__ uint64_t operand_at(uint32_t place, size_t bytes = 0) {
  static_assert(kRowBytes == 64 || kRowBytes == 128);
  constexpr uint32_t kEightRows = 8 * kRowBytes / 16, kSwizzle = kRowBytes == 128 ? 1u : 2u;
  uint64_t description;
  asm("mov.b64 %0, {%1, %2};"
      : "=l"(description)
      : "r"(place + (places(bytes) | 1u << 16)), "n"(kEightRows | kSwizzle << 30));
  return description;
}

/// Where the byte at `offset` of such an operand lies.
template <int kRowBytes>
__device__ __forceinline__ uint32_t swizzled(uint32_t offset) {
  static_assert(kRowBytes == 64 || kRowBytes == 128);
  return offset ^ (offset >> 7 & (kRowBytes == 128 ? 7 : 3)) << 4;
}

// Lists of operands. An instruction names its sums %0 … %(N/2 - 1), and then the rest.
#define SAGE_NAMES_16 "%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15"
#define SAGE_NAMES_32 \
  SAGE_NAMES_16 ",%16,%17,%18,%19,%20,%21,%22,%23,%24,%25,%26,%27,%28,%29,%30,%31"
#define SAGE_NAMES_48 \
  SAGE_NAMES_32 ",%32,%33,%34,%35,%36,%37,%38,%39,%40,%41,%42,%43,%44,%45,%46,%47"
#define SAGE_NAMES_64 \
  SAGE_NAMES_48 ",%48,%49,%50,%51,%52,%53,%54,%55,%56,%57,%58,%59,%60,%61,%62,%63"
#define SAGE_SUMS_4(how, c, i) how(c[i]), how(c[i + 1]), how(c[i + 2]), how(c[i + 3])
#define SAGE_SUMS_16(how, c, i)                                                   \
  SAGE_SUMS_4(how, c, i), SAGE_SUMS_4(how, c, i + 4), SAGE_SUMS_4(how, c, i + 8), \
      SAGE_SUMS_4(how, c, i + 12)
#define SAGE_SUMS_32(how, c, i) SAGE_SUMS_16(how, c, i), SAGE_SUMS_16(how, c, i + 16)
#define SAGE_SUMS_64(how, c, i) SAGE_SUMS_32(how, c, i), SAGE_SUMS_32(how, c, i + 32)

// Both operands in shared memory.
#define SAGE_WGMMA_SS(name, columns, count, kind, how, type, first, second, third, tail)    \
  __device__ __forceinline__ void name(type(&c)[count], uint64_t a, uint64_t b, bool add) { \
    asm volatile("{ .reg .pred p; setp.ne.b32 p, %" third                                   \
                 ", 0;\n"                                                                   \
                 "wgmma.mma_async.sync.aligned.m64n" columns kind " {" SAGE_NAMES_##count   \
                 "}, %" first ", %" second ", p" tail "; }"                                 \
                 : SAGE_SUMS_##count(how, c, 0)                                             \
                 : "l"(a), "l"(b), "r"(static_cast<int>(add)));                             \
  }
// A in registers.
#define SAGE_WGMMA_RS(name, columns, count, kind, how, type, a_names, b_name, add_name, tail)      \
  __device__ __forceinline__ void name(type(&c)[count], const uint32_t* a, uint64_t b, bool add) { \
    asm volatile("{ .reg .pred p; setp.ne.b32 p, %" add_name                                       \
                 ", 0;\n"                                                                          \
                 "wgmma.mma_async.sync.aligned.m64n" columns kind " {" SAGE_NAMES_##count          \
                 "}, {" a_names "}, %" b_name ", p" tail "; }"                                     \
                 : SAGE_SUMS_##count(how, c, 0)                                                    \
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b),                             \
                   "r"(static_cast<int>(add)));                                                    \
  }

/// c = A·B, or c += A·B if `add`. INT8, 32 contraction indices.
SAGE_WGMMA_SS(wgmma_8, "128", 64, "k32.s32.s8.s8", "+r", int, "64", "65", "66", "")
SAGE_WGMMA_SS(wgmma_8, "64", 32, "k32.s32.s8.s8", "+r", int, "32", "33", "34", "")
/// The same with A in registers: codes of P (unsigned) or of dS (signed).
SAGE_WGMMA_RS(wgmma_u8, "64", 32, "k32.s32.u8.s8", "+r", int, "%32,%33,%34,%35", "36", "37", "")
SAGE_WGMMA_RS(wgmma_s8, "64", 32, "k32.s32.s8.s8", "+r", int, "%32,%33,%34,%35", "36", "37", "")
SAGE_WGMMA_RS(wgmma_s8, "32", 16, "k32.s32.s8.s8", "+r", int, "%16,%17,%18,%19", "20", "21", "")
/// In 16 bit, 16 contraction indices.
SAGE_WGMMA_SS(wgmma_bf16, "64", 32, "k16.f32.bf16.bf16", "+f", float, "32", "33", "34",
              ", 1, 1, 0, 0")
SAGE_WGMMA_SS(wgmma_f16, "64", 32, "k16.f32.f16.f16", "+f", float, "32", "33", "34", ", 1, 1, 0, 0")
SAGE_WGMMA_RS(wgmma_bf16, "64", 32, "k16.f32.bf16.bf16", "+f", float, "%32,%33,%34,%35", "36", "37",
              ", 1, 1, 0")
/// The same with -A.
SAGE_WGMMA_SS(wgmma_bf16_minus, "64", 32, "k16.f32.bf16.bf16", "+f", float, "32", "33", "34",
              ", -1, 1, 0, 0")
SAGE_WGMMA_SS(wgmma_f16_minus, "64", 32, "k16.f32.f16.f16", "+f", float, "32", "33", "34",
              ", -1, 1, 0, 0")

#undef SAGE_WGMMA_RS
#undef SAGE_WGMMA_SS
#undef SAGE_SUMS_64
#undef SAGE_SUMS_32
#undef SAGE_SUMS_16
#undef SAGE_SUMS_4
#undef SAGE_NAMES_64
#undef SAGE_NAMES_48
#undef SAGE_NAMES_32
#undef SAGE_NAMES_16

template <typename T>
__device__ __forceinline__ void wgmma_16(float (&c)[32], uint64_t a, uint64_t b, bool add) {
  if constexpr (std::is_same_v<T, __nv_bfloat16>)
    wgmma_bf16(c, a, b, add);
  else
    wgmma_f16(c, a, b, add);
}
template <typename T>
__device__ __forceinline__ void wgmma_16_minus(float (&c)[32], uint64_t a, uint64_t b, bool add) {
  if constexpr (std::is_same_v<T, __nv_bfloat16>)
    wgmma_bf16_minus(c, a, b, add);
  else
    wgmma_f16_minus(c, a, b, add);
}

/// How many registers each thread of the warpgroup has from here on.
template <int kRegisters>
__device__ __forceinline__ void take_registers() {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(kRegisters));
}
template <int kRegisters>
__device__ __forceinline__ void leave_registers() {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(kRegisters));
}

}  // namespace sagebwd::cuda::arch
