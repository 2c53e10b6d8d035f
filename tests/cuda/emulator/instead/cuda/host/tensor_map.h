// SPDX-License-Identifier: Apache-2.0
// Here no map describes a tensor, so kernels copy tokens by loads and stores.
#pragma once

#include <cuda.h>

#include <cstdint>

#include "cuda/tile/views.h"

namespace sagebwd::cuda {

inline bool token_map(CUtensorMap&, const Strided&, int64_t, int64_t, int64_t, int, int) {
  return false;
}

}  // namespace sagebwd::cuda
