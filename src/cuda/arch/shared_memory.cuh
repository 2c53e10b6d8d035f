// SPDX-License-Identifier: Apache-2.0
// Asynchronous copies into shared memory and matrix loads out of it. Addresses are 32-bit
// shared-window addresses.
#pragma once

#include <cstdint>

namespace sagebwd::cuda::arch {

__device__ __forceinline__ uint32_t shared_address(const void* p) {
  return static_cast<uint32_t>(__cvta_generic_to_shared(p));
}

/// What lies at an address, which is a multiple of `alignment`. The compiler knows that it is
/// shared memory.
__device__ __forceinline__ void* shared_pointer(uint32_t address, uint32_t /*alignment*/) {
  return __cvta_shared_to_generic(address);
}

__device__ __forceinline__ void cp_async_16(uint32_t to, const void* from) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(to), "l"(from) : "memory");
}

/// The same where `wanted`, without a branch.
__device__ __forceinline__ void cp_async_16_if(bool wanted, uint32_t to, const void* from) {
  asm volatile(
      "{ .reg .pred p; setp.ne.b32 p, %2, 0; @p cp.async.cg.shared.global [%0], [%1], 16; }" ::"r"(
          to),
      "l"(from), "r"(static_cast<int>(wanted))
      : "memory");
}

/// The same where `real`, else zeros; then nothing is read.
__device__ __forceinline__ void cp_async_16_or_zero(uint32_t to, const void* from, bool real) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(to), "l"(from),
               "r"(real ? 16 : 0)
               : "memory");
}

/// The same for data that nobody reads again: in the second-level cache it is the first to make
/// room.
__device__ __forceinline__ void cp_async_16_once_or_zero(uint32_t to, const void* from, bool real) {
  uint64_t policy;
  asm("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(policy));
  asm volatile("cp.async.cg.shared.global.L2::cache_hint [%0], [%1], 16, %2, %3;" ::"r"(to),
               "l"(from), "r"(real ? 16 : 0), "l"(policy)
               : "memory");
}

__device__ __forceinline__ void cp_async_4(uint32_t to, const void* from) {
  asm volatile("cp.async.ca.shared.global [%0], [%1], 4;" ::"r"(to), "l"(from) : "memory");
}

__device__ __forceinline__ void cp_async_8(uint32_t to, const void* from) {
  asm volatile("cp.async.ca.shared.global [%0], [%1], 8;" ::"r"(to), "l"(from) : "memory");
}

/// The same where `real`, else zeros; then nothing is read.
__device__ __forceinline__ void cp_async_8_or_zero(uint32_t to, const void* from, bool real) {
  asm volatile("cp.async.ca.shared.global [%0], [%1], 8, %2;" ::"r"(to), "l"(from),
               "r"(real ? 8 : 0)
               : "memory");
}

__device__ __forceinline__ void cp_async_commit() {
  asm volatile("cp.async.commit_group;" ::: "memory");
}

/// Waits until at most kPending of the newest groups are under way.
template <int kPending>
__device__ __forceinline__ void cp_async_wait() {
  asm volatile("cp.async.wait_group %0;" ::"n"(kPending) : "memory");
}

/// Four 8x8 matrices of 16-bit elements; lanes 8i … 8i + 7 give the row addresses of matrix i, and
/// lane 4g + t receives bytes 4t … 4t + 3 of row g of each.
__device__ __forceinline__ void ldmatrix_x4(uint32_t (&r)[4], uint32_t address) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(address)
               : "memory");
}

/// The same with each matrix transposed.
__device__ __forceinline__ void ldmatrix_x4_trans(uint32_t (&r)[4], uint32_t address) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(address)
               : "memory");
}

/// Stores four 8x8 matrices, each transposed: the reverse of ldmatrix_x4_trans. sm_90 and later.
__device__ __forceinline__ void stmatrix_x4_trans(uint32_t address, uint32_t r0, uint32_t r1,
                                                  uint32_t r2, uint32_t r3) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1,%2,%3,%4};" ::"r"(address),
               "r"(r0), "r"(r1), "r"(r2), "r"(r3)
               : "memory");
}

/// What this thread has written to shared memory is seen by products and copies that are issued
/// behind the next barrier. sm_90 and later.
__device__ __forceinline__ void shared_writes_done() {
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}

}  // namespace sagebwd::cuda::arch
