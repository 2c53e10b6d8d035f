// SPDX-License-Identifier: Apache-2.0
// The one place that launches kernels.
#pragma once

#include <cuda_runtime.h>

#include "cuda/host/check.h"

namespace sagebwd::cuda {

/// Starts `kernel` on the stream. Does nothing if the grid is empty.
template <typename Params>
void launch(void (*kernel)(Params), dim3 grid, int threads, int shared_bytes, const Params& params,
            cudaStream_t stream) {
  if (grid.x == 0 || grid.y == 0 || grid.z == 0) return;
  if (shared_bytes > 48 * 1024)
    SAGE_CUDA(
        cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, shared_bytes));
  kernel<<<grid, threads, static_cast<size_t>(shared_bytes), stream>>>(params);
  SAGE_CUDA(cudaGetLastError());
}

}  // namespace sagebwd::cuda
