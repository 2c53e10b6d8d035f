// SPDX-License-Identifier: Apache-2.0
// Sums, and other results, over all threads up to each one.
#pragma once

namespace sagebwd::cuda::tile {

/// Inclusive scan over a warp.
template <typename V, typename Op>
__device__ V scan_warp(V x, Op op) {
  const int lane = static_cast<int>(threadIdx.x) % 32;
  for (int step = 1; step < 32; step *= 2) {
    const V other = __shfl_up_sync(0xffffffffu, x, static_cast<unsigned>(step));
    if (lane >= step) x = op(other, x);
  }
  return x;
}

template <typename V>
struct Scanned {
  V here, all;  // the result up to this thread, and that of all
};

/// Inclusive scan over a thread block of 1024. `shared` has 32 places.
template <typename V, typename Op>
__device__ Scanned<V> scan_block(V x, V* shared, Op op) {
  const int lane = static_cast<int>(threadIdx.x) % 32, warp = static_cast<int>(threadIdx.x) / 32;
  x = scan_warp(x, op);
  if (lane == 31) shared[warp] = x;
  __syncthreads();
  if (warp == 0) shared[lane] = scan_warp(shared[lane], op);
  __syncthreads();
  if (warp > 0) x = op(shared[warp - 1], x);
  const V all = shared[31];
  __syncthreads();
  return {x, all};
}

}  // namespace sagebwd::cuda::tile
