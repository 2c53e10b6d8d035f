// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cuda.h>

#include "cuda/quantize/quantize.h"

namespace sagebwd::cuda::sm90 {

/// The job of the kernel of codes: that of a forward, with maps for copies of whole blocks. Tensors
/// that no map can describe have none, and are copied slowly.
struct CodesJob : OperandJob {
  CUtensorMap q_map, k_map, v_map;
  bool q_mapped, k_mapped, v_mapped;
};

}  // namespace sagebwd::cuda::sm90
