// SPDX-License-Identifier: Apache-2.0
// The one place that launches kernels.
#pragma once

#include <cuda_runtime.h>

#include "cuda/host/check.h"

namespace sagebwd::cuda {

/// When a kernel starts: when the one before it in the stream has ended, or `early`, as soon as
/// that one lets it and leaves room. Then it must call arch::wait_for_earlier_kernels before it
/// touches what another kernel reads or writes. Needs compute capability 9.0.
enum class Start { behind, early };

/// Starts `kernel` on the stream. Does nothing if the grid is empty.
template <typename Params>
void launch(void (*kernel)(Params), dim3 grid, int threads, int shared_bytes, const Params& params,
            cudaStream_t stream, Start start = Start::behind) {
  if (grid.x == 0 || grid.y == 0 || grid.z == 0) return;
  if (shared_bytes > 48 * 1024)
    SAGE_CUDA(
        cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, shared_bytes));
  cudaLaunchAttribute early{};
  early.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  early.val.programmaticStreamSerializationAllowed = 1;
  cudaLaunchConfig_t config{};
  config.gridDim = grid, config.blockDim = dim3(static_cast<unsigned>(threads));
  config.dynamicSmemBytes = static_cast<size_t>(shared_bytes), config.stream = stream;
  config.attrs = &early, config.numAttrs = start == Start::early ? 1 : 0;
  SAGE_CUDA(cudaLaunchKernelEx(&config, kernel, params));
}

}  // namespace sagebwd::cuda
