// SPDX-License-Identifier: Apache-2.0
// dK, dV and dQ on Hopper: a thread block has 128 keys and loops over tiles of queries, 64
// or, with 64 channels, 128.
//
//   consumers  two warpgroups with 64 keys each. Per tile: S = K8·Q8ᵀ, P, dP = V8·dOᵀ (16 bit),
//              dS = P·(dP - D), dV += P8·dO8, dK += dS8·Q8
//   dQ         one warpgroup. Per tile: codes of dS with a scale per query, dQ += dS8·K8, added up
//              in memory. Three of its threads start the copies.
//
//              full                                        dS full
//   copies ──────────→ front: Q8, dO, stats (2 tiles) → consumers ──────────→ dQ
//          ──────────→ back: Q8ᵀ, dO8ᵀ (2 tiles)      →           ←──────────
//                                                                  dS empty
#pragma once

#include "cuda/arch/kernel_order.cuh"
#include "cuda/arch/wgmma.cuh"
#include "cuda/sm90/bwd/consumer.cuh"
#include "cuda/sm90/bwd/dq.cuh"

namespace sagebwd::cuda::sm90 {

namespace bwd {
/// Registers of a thread. The three warpgroups start with 3 x 168.
inline constexpr int kConsumerRegisters = 216, kDqRegisters = 72;
}  // namespace bwd

/// Sum: what dQ is added up in, float or __half.
template <typename T, int D, typename Sum, bwd::Wants kWants>
__global__ void __launch_bounds__(bwd::kThreads, 1)
    backward_kernel(const __grid_constant__ BackwardParams p) {
  using namespace bwd;
  extern __shared__ __align__(1024) uint8_t memory[];
  // Through a shuffle, so that the compiler knows that the warp agrees on it.
  const int warpgroup = __shfl_sync(0xffffffffu, static_cast<int>(threadIdx.x / 128), 0);
  const uint32_t warp = __shfl_sync(0xffffffffu, threadIdx.x / 32 % 4, 0);
  // The same, and so that it is not worked out again for every tile.
  const uint32_t address = __shfl_sync(0xffffffffu, arch::shared_address(memory), 0);
  auto& shared = *static_cast<SharedPlan<D>*>(arch::shared_pointer(address, 1024));
  if (threadIdx.x == 0) init_barriers(shared);
  arch::wait_for_earlier_kernels();
  arch::let_next_kernel_start();
  if (threadIdx.x == 0) shared.walk = walk_of<D, kWants>(p);
  __syncthreads();
  if (shared.walk.key0 >= shared.walk.s.nk) return;  // the padding of a sequence
  const uint32_t place = __shfl_sync(0xffffffffu, arch::place_of(address), 0);  // likewise
  if (warpgroup == kConsumers) {
    arch::leave_registers<kDqRegisters>();
    if (shared.walk.queries > 0)
      DqMaker<D, Sum, kWants>{p, shared, warp, threadIdx.x % 32, place}.run();
  } else {
    arch::take_registers<kConsumerRegisters>();
    Consumer<T, D>{p, shared, warpgroup, warp, threadIdx.x % 32, place}.run();
  }
}

}  // namespace sagebwd::cuda::sm90
