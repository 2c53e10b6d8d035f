// SPDX-License-Identifier: Apache-2.0
// Saved codes of K and V with padding, for sequences that do not end with a whole block and for
// packed ones.
#pragma once

#include "cuda/arch/kernel_order.cuh"
#include "cuda/sm90/bwd/operands.h"
#include "cuda/tile/layout.h"
#include "cuda/tile/sequence.cuh"

namespace sagebwd::cuda::sm90 {

inline constexpr int kPadThreads = 128;

/// A thread block has a block of keys of one head.
__global__ void __launch_bounds__(kPadThreads)
    pad_keys_kernel(const __grid_constant__ BackwardJob job) {
  arch::wait_for_earlier_kernels();
  arch::let_next_kernel_start();
  const int block = static_cast<int>(blockIdx.x), head = static_cast<int>(blockIdx.y),
            thread = static_cast<int>(threadIdx.x);
  const tile::Sequence s = tile::sequence_of_block<kBlock>(job.seq, block, false);
  const int first = static_cast<int>(static_cast<int64_t>(block) * kBlock - s.k_pad),
            left = s.nk - first;  // 0 or less behind the last document
  const int64_t from = head * job.saved.keys + s.batch * job.seq.nk + s.k_begin + first,
                to = head * job.tk + static_cast<int64_t>(block) * kBlock;
  const auto copy = [&](const int8_t* codes, int8_t* padded) {
    const auto* source = reinterpret_cast<const uint4*>(codes + from * job.d);
    auto* target = reinterpret_cast<uint4*>(padded + to * job.d);
    const int chunks = job.d / 16, real = left * chunks;
#pragma unroll 4
    for (int i = thread; i < kBlock * chunks; i += kPadThreads)
      target[i] = i < real ? source[i] : make_uint4(0, 0, 0, 0);
  };
  copy(job.saved.k8, job.k8);
  copy(job.saved.v8, job.v8);
  static_assert(kPadThreads == kBlock, "a thread has the scale of a key");
  job.v_scale[to + thread] = thread < left ? job.saved.v_scale[from + thread] : 1.0f;
  // Where there is no key, that of one which holds NaN: it does not count in the operand of dQ.
  job.k_scale[to + thread] =
      thread < left ? job.saved.k_scale[from + thread] : __int_as_float(0x7fffffff);
}

}  // namespace sagebwd::cuda::sm90
