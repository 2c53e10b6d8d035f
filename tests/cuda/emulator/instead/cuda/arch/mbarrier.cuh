// SPDX-License-Identifier: Apache-2.0
// Barriers in shared memory. There are no bulk copies here, so only arrivals end a phase.
#pragma once

#include <cuda.h>

#include <cstdint>

#include "emulator/block.h"

namespace sagebwd::cuda::arch {

struct SharedBarrier {
  uint16_t arrivals, missing;
  uint32_t phase;
};
static_assert(sizeof(SharedBarrier) == 8);

inline SharedBarrier& barrier_at(uint32_t address) {
  return *static_cast<SharedBarrier*>(emulator::shared_pointer(address, 8));
}
inline void barrier_init(uint32_t barrier, int arrivals) {
  const auto all = static_cast<uint16_t>(arrivals);
  barrier_at(barrier) = {all, all, 0};
}
inline void barrier_init_done() {}
inline void barrier_arrive(uint32_t barrier) {
  SharedBarrier& b = barrier_at(barrier);
  if (--b.missing == 0) b.missing = b.arrivals, ++b.phase;
}
inline void barrier_expect(uint32_t, uint32_t) { emulator::fail("a barrier expects a bulk copy"); }
inline void barrier_wait(uint32_t barrier, uint32_t parity) {
  while (barrier_at(barrier).phase % 2 == parity) emulator::block->pause();
}

inline void barrier_of(int number, int threads) { emulator::block->barrier(number, threads); }

enum class Keep { most, least };
inline void copy_tokens(uint32_t, const CUtensorMap&, int, int, int, uint32_t, Keep) {
  emulator::fail("there are no maps for bulk copies");
}

}  // namespace sagebwd::cuda::arch
