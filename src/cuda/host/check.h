// SPDX-License-Identifier: Apache-2.0
// SAGE_CUDA checks the result of a CUDA call.
#pragma once

#include <cuda_runtime_api.h>

#include "base/check.h"

#define SAGE_CUDA(call)                                              \
  do {                                                               \
    const cudaError_t sage_status_ = (call);                         \
    if (sage_status_ != cudaSuccess)                                 \
      SAGE_THROW(::sagebwd::ErrorKind::internal,                     \
                 #call << ": " << cudaGetErrorString(sage_status_)); \
  } while (0)
