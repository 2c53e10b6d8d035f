// SPDX-License-Identifier: Apache-2.0
// Barriers in shared memory, and the bulk copies that report to them.
//
// A barrier has phases. A phase ends when so many threads have arrived as `init` said and all bytes
// that were announced are there. Waiting names the parity of the phase: 0 for the first, 1 for the
// second, and so on. Before the first phase has ended, a wait for parity 1 returns at once.
#pragma once

#include <cuda.h>

#include <cstdint>

namespace sagebwd::cuda::arch {

__device__ __forceinline__ void barrier_init(uint32_t barrier, int arrivals) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(arrivals) : "memory");
}
/// Makes fresh barriers known to copies.
__device__ __forceinline__ void barrier_init_done() {
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}
__device__ __forceinline__ void barrier_arrive(uint32_t barrier) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(barrier) : "memory");
}
/// Arrives and announces bytes that copies will bring.
__device__ __forceinline__ void barrier_expect(uint32_t barrier, uint32_t bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes)
               : "memory");
}
__device__ __forceinline__ void barrier_wait(uint32_t barrier, uint32_t parity) {
  asm volatile(
      "{ .reg .pred p;\n"
      "again: mbarrier.try_wait.parity.shared::cta.b64 p, [%0], %1;\n"
      "@p bra done;\n"
      "bra again;\n"
      "done: }" ::"r"(barrier),
      "r"(parity)
      : "memory");
}

/// A barrier of so many threads. `number`: from 1 on, one for each group of threads that has one.
__device__ __forceinline__ void barrier_of(int number, int threads) {
  asm volatile("barrier.sync %0, %1;" ::"r"(number), "r"(threads) : "memory");
}
/// That of one warpgroup.
__device__ __forceinline__ void warpgroup_barrier(int number) {
  asm volatile("barrier.sync %0, 128;" ::"r"(number) : "memory");
}

/// Copies `bytes` contiguous bytes; both addresses and the size are multiples of 16.
__device__ __forceinline__ void copy_bulk(uint32_t to, const void* from, uint32_t bytes,
                                          uint32_t barrier) {
  asm volatile(
      "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::
          "r"(to),
      "l"(from), "r"(bytes), "r"(barrier)
      : "memory");
}
/// Copies a box of a matrix. `row`: its first row. The map says how large the box is and how it is
/// swizzled.
__device__ __forceinline__ void copy_rows(uint32_t to, const CUtensorMap& map, int column, int row,
                                          uint32_t barrier) {
  asm volatile(
      "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%2, "
      "%3}], [%4];" ::"r"(to),
      "l"(&map), "r"(column), "r"(row), "r"(barrier)
      : "memory");
}

/// Copies rows of a matrix in panels of columns, which end up behind one another.
__device__ __forceinline__ void copy_panels(uint32_t to, const CUtensorMap& map, int row,
                                            uint32_t barrier) {
  asm volatile(
      "cp.async.bulk.tensor.3d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%2, "
      "%3, %4}], [%5];" ::"r"(to),
      "l"(&map), "r"(0), "r"(row), "r"(0), "r"(barrier)
      : "memory");
}

/// Copies tokens of a head, in panels of channels (host/tensor_map.h).
__device__ __forceinline__ void copy_tokens(uint32_t to, const CUtensorMap& map, int token,
                                            int head, int batch, uint32_t barrier) {
  asm volatile(
      "cp.async.bulk.tensor.5d.shared::cluster.global.mbarrier::complete_tx::bytes "
      "[%0], [%1, {%2, %3, %4, %5, %6}], [%7];" ::"r"(to),
      "l"(&map), "r"(0), "r"(token), "r"(0), "r"(head), "r"(batch), "r"(barrier)
      : "memory");
}
/// The same for tokens that nobody reads again. In the second-level cache they are the first to
/// make room.
__device__ __forceinline__ void copy_tokens_once(uint32_t to, const CUtensorMap& map, int token,
                                                 int head, int batch, uint32_t barrier) {
  uint64_t policy;
  asm volatile("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(policy));
  asm volatile(
      "cp.async.bulk.tensor.5d.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint "
      "[%0], [%1, {%2, %3, %4, %5, %6}], [%7], %8;" ::"r"(to),
      "l"(&map), "r"(0), "r"(token), "r"(0), "r"(head), "r"(batch), "r"(barrier), "l"(policy)
      : "memory");
}

}  // namespace sagebwd::cuda::arch
