// SPDX-License-Identifier: Apache-2.0
// The forward with block lists: persistent thread blocks of three warpgroups.
//
//   producer   one warp: fetches a piece of work (128 queries of a head, which share a list),
//              copies Q8, then the listed tiles of 64 keys, two to a stage
//   consumers  two warpgroups with 64 queries each, with the softmax, shares and codes of
//              fwd/kernel.cuh. Each starts the scores of its next stage before it makes codes of P.
//
//              full                       empty
//   producer ────────→ stage (4 x 2 tiles) ────────→ producer
//            ────────→ slot (2 pieces)     ────────→
#pragma once

#include "cuda/arch/kernel_order.cuh"
#include "cuda/arch/wgmma.cuh"
#include "cuda/sm90/fwd/listed/consumer.cuh"
#include "cuda/sm90/fwd/listed/producer.cuh"

namespace sagebwd::cuda::sm90 {

namespace fwd::listed {
/// Registers of a thread. The three warpgroups together have 3 x 168.
inline constexpr int kConsumerRegisters = 232, kProducerRegisters = 40;
}  // namespace fwd::listed

template <typename T, int D>
__global__ void __launch_bounds__(fwd::listed::kThreads, 1)
    listed_forward_kernel(const __grid_constant__ ListedParams p) {
  using namespace fwd::listed;
  extern __shared__ __align__(1024) uint8_t memory[];
  auto& shared = *reinterpret_cast<SharedPlan<D>*>(memory);
  // Through a shuffle, so that the compiler knows that the warp agrees on it.
  const int warpgroup = __shfl_sync(0xffffffffu, static_cast<int>(threadIdx.x / 128), 0);
  const uint32_t warp = __shfl_sync(0xffffffffu, threadIdx.x / 32 % 4, 0);
  if (threadIdx.x == 0) init_barriers(shared);
  arch::wait_for_earlier_kernels();
  __syncthreads();
  if (warpgroup == kConsumers) {
    arch::leave_registers<kProducerRegisters>();
    if (warp == 0) Producer<D>{p, shared, threadIdx.x % 32}.run();
  } else {
    arch::take_registers<kConsumerRegisters>();
    Consumer<T, D>{p,    shared,           warpgroup,
                   warp, threadIdx.x % 32, arch::place_of(arch::shared_address(memory))}
        .run();
  }
}

}  // namespace sagebwd::cuda::sm90
