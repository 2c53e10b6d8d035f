// SPDX-License-Identifier: Apache-2.0
// A pipeline: places in shared memory that are used in turn, each with barriers that say when it is
// full and when it is empty again (arch/mbarrier.cuh).
#pragma once

#include <cstdint>

#include "cuda/arch/mbarrier.cuh"
#include "cuda/arch/shared_memory.cuh"

namespace sagebwd::cuda::sm90 {

/// Which place is next, and the parity of the phase in which it is waited for. `first`: that of the
/// first round; 1 for who fills, because the first round finds all places empty.
template <int kPlaces>
class Ring {
 public:
  __device__ explicit Ring(uint32_t first) : parity_(first) {}
  __device__ __forceinline__ int place() const { return place_; }
  __device__ __forceinline__ uint32_t parity() const { return parity_; }
  __device__ __forceinline__ void advance() {
    if (++place_ == kPlaces) place_ = 0, parity_ ^= 1;
  }

 private:
  int place_ = 0;
  uint32_t parity_;
};

/// The same by a number that counts up, in one register. Who empties begins with it.
template <int kPlaces>
struct Nth {
  uint32_t number = 0;
  __device__ uint32_t place() const { return number % kPlaces; }
  __device__ uint32_t parity() const { return number / kPlaces % 2; }
  __device__ Nth next() const { return {number + 1}; }
};

/// Waits until the next place is full, or empty.
template <int kPlaces, class Turn>
__device__ __forceinline__ void wait_for(uint64_t (&barriers)[kPlaces], const Turn& turn) {
  arch::barrier_wait(arch::shared_address(&barriers[turn.place()]), turn.parity());
}
/// Waits until a place can be filled, where who fills counts with Nth: the first round finds all
/// places empty.
template <int kPlaces>
__device__ __forceinline__ void wait_until_empty(uint64_t (&barriers)[kPlaces],
                                                 const Nth<kPlaces>& turn) {
  arch::barrier_wait(arch::shared_address(&barriers[turn.place()]), turn.parity() ^ 1);
}
/// Says that a thread is done with the place.
template <int kPlaces, class Turn>
__device__ __forceinline__ void arrive_at(uint64_t (&barriers)[kPlaces], const Turn& turn) {
  arch::barrier_arrive(arch::shared_address(&barriers[turn.place()]));
}

}  // namespace sagebwd::cuda::sm90
