// SPDX-License-Identifier: Apache-2.0
// O = softmax(c·QKᵀ)·V on Hopper: persistent thread blocks of four warpgroups.
//
//   producer   one warp: fetches a piece of work (192 queries of a head), copies Q8, then tiles of
//              128 keys: K8, V8ᵀ, scales
//   consumers  three warpgroups with 64 queries each. Per tile: S = Q8·K8ᵀ, P, codes, O += P8·V8.
//
// The consumers are independent. While one waits for products, the others have the exponentials.
//
//              full                      empty
//   producer ────────→ stage (3 tiles) ────────→ producer     each consumer releases a tile when it
//            ────────→ slot (2 pieces)  ────────→             has multiplied it, a piece at its end
#pragma once

#include "cuda/arch/kernel_order.cuh"
#include "cuda/arch/wgmma.cuh"
#include "cuda/sm90/fwd/consumer.cuh"
#include "cuda/sm90/fwd/producer.cuh"

namespace sagebwd::cuda::sm90 {

namespace fwd {
/// Registers of a thread. The four warpgroups together have 4 x 128.
inline constexpr int kConsumerRegisters = 160, kProducerRegisters = 32;
}  // namespace fwd

template <typename T, int D>
__global__ void __launch_bounds__(fwd::kThreads, 1)
    forward_kernel(const __grid_constant__ ForwardParams p) {
  using namespace fwd;
  extern __shared__ __align__(1024) uint8_t memory[];
  // Through a shuffle, so that the compiler knows that the warp agrees on it.
  const int warpgroup = __shfl_sync(0xffffffffu, static_cast<int>(threadIdx.x / 128), 0);
  const uint32_t warp = __shfl_sync(0xffffffffu, threadIdx.x / 32 % 4, 0);
  // The same, and so that it is not worked out again for every tile.
  const uint32_t place = __shfl_sync(0xffffffffu, arch::place_of(arch::shared_address(memory)), 0);
  auto& shared = *reinterpret_cast<SharedPlan<D>*>(memory);
  if (threadIdx.x == 0) init_barriers(shared);
  arch::wait_for_earlier_kernels();
  __syncthreads();
  if (warpgroup == kConsumers) {
    arch::leave_registers<kProducerRegisters>();
    if (warp == 0) Producer<D>{p, shared, threadIdx.x % 32}.run();
  } else {
    arch::take_registers<kConsumerRegisters>();
    Consumer<T, D>{p, shared, warpgroup, warp, threadIdx.x % 32, place}.run();
  }
}

}  // namespace sagebwd::cuda::sm90
