// SPDX-License-Identifier: Apache-2.0
// The launch of src/cuda/host/launch.h, which needs nvcc's syntax.
#pragma once

#include <cuda_runtime.h>

#include "cuda/host/check.h"

namespace sagebwd::cuda {

enum class Start { behind, early };

template <typename Params>
void launch(void (*kernel)(Params), dim3 grid, int threads, int shared_bytes, const Params& params,
            cudaStream_t, Start = Start::behind) {
  emulator::note_launch(reinterpret_cast<void (*)()>(kernel));
  struct Call {
    void (*kernel)(Params);
    const Params& params;
  };
  const Call call{kernel, params};
  emulator::run_grid(
      grid, threads, shared_bytes,
      [](const void* p) {
        const Call& c = *static_cast<const Call*>(p);
        c.kernel(c.params);
      },
      &call);
}

}  // namespace sagebwd::cuda
