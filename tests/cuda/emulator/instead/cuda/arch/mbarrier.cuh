// SPDX-License-Identifier: Apache-2.0
// Barriers in shared memory, and the bulk copies that report to them (emulator/bulk.h).
#pragma once

#include <cuda.h>

#include <cstdint>

#include "emulator/block.h"
#include "emulator/bulk.h"
#include "emulator/faults.h"

namespace sagebwd::cuda::arch {

inline void barrier_init(uint32_t barrier, int arrivals) {
  emulator::init_barrier(barrier, arrivals);
}
inline void barrier_init_done() {}
inline void barrier_arrive(uint32_t barrier) { emulator::arrive_at_barrier(barrier, 0); }
inline void barrier_expect(uint32_t barrier, uint32_t bytes) {
  emulator::arrive_at_barrier(barrier, bytes);
}
inline void barrier_wait(uint32_t barrier, uint32_t parity) {
  emulator::wait_for_barrier(barrier, parity);
}

inline void barrier_of(int number, int threads) {
  if (!emulator::has_fault(emulator::Fault::named_barrier))
    emulator::block->barrier(number, threads);
}
inline void warpgroup_barrier(int number) { barrier_of(number, 128); }

inline void copy_bulk(uint32_t to, const void* from, uint32_t bytes, uint32_t barrier) {
  emulator::copy_bytes(to, from, bytes, barrier);
}
inline void copy_rows(uint32_t to, const CUtensorMap& map, int column, int row, uint32_t barrier) {
  emulator::copy_box(to, map, {column, row}, barrier);
}
inline void copy_panels(uint32_t to, const CUtensorMap& map, int row, uint32_t barrier) {
  emulator::copy_box(to, map, {0, row, 0}, barrier);
}
inline void copy_tokens(uint32_t to, const CUtensorMap& map, int token, int head, int batch,
                        uint32_t barrier) {
  emulator::copy_box(to, map, {0, token, 0, head, batch}, barrier);
}
inline void copy_tokens_once(uint32_t to, const CUtensorMap& map, int token, int head, int batch,
                             uint32_t barrier) {
  copy_tokens(to, map, token, head, batch, barrier);
}

}  // namespace sagebwd::cuda::arch
