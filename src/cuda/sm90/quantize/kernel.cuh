// SPDX-License-Identifier: Apache-2.0
// Codes of Q, K and V: all operands of a forward, in persistent thread blocks.
//
//   producer   one warp: takes a piece of work (tuned/items.cuh), copies its tokens and centre
//   consumers  one or two warpgroups: a product brings 128 tokens to registers, Q and K rotated;
//              then scales and codes
//
//              full                                     empty
//   producer ────────→ stage (2 blocks of tokens) ────────────→ producer
#pragma once

#include "cuda/arch/kernel_order.cuh"
#include "cuda/sm90/quantize/consumer.cuh"
#include "cuda/sm90/quantize/producer.cuh"

namespace sagebwd::cuda::sm90 {

template <typename T, int D>
__global__ void __launch_bounds__(codes::Shape<D>::kThreads, codes::Shape<D>::kResident)
    codes_kernel(const __grid_constant__ CodesJob job) {
  using namespace codes;
  static_assert(arch::shared_memory_for(sizeof(SharedPlan<T, D>), Shape<D>::kResident) <=
                arch::shared_memory_of(900));
  extern __shared__ __align__(1024) uint8_t memory[];
  auto& shared = *reinterpret_cast<SharedPlan<T, D>*>(memory);
  const uint32_t place = __shfl_sync(0xffffffffu, arch::place_of(arch::shared_address(memory)), 0);
  if (threadIdx.x == 0) init_barriers(shared);
  shared.matrices.fill();
  arch::shared_writes_done();
  arch::wait_for_earlier_kernels();
  arch::let_next_kernel_start();
  __syncthreads();
  if (threadIdx.x >= Shape<D>::kConsumers)
    Producer<T, D>{job, shared, threadIdx.x % 32}.run();
  else
    Consumer<T, D>{job, shared, place}.run();
}

}  // namespace sagebwd::cuda::sm90
