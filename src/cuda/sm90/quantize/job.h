// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cuda.h>

#include <cstdint>

#include "cuda/sm90/formats.h"
#include "cuda/tuned/operands.h"

namespace sagebwd::cuda::sm90 {

using tuned::CentreColumns, tuned::CentreRows;

/// All operands of a forward, or the codes that a backward reads. Outputs that are null are not
/// made.
struct CodesJob : tuned::OperandJob {
  CentreRows centre_rows;
  CentreColumns value_columns;
  bool centres_are_zero = false;  // the recipe has none
  KeyNumbers* numbers = nullptr;  // [hk, tk / kBlock]
  // Maps for copies of whole blocks. Tensors that no map can describe have none, and are copied
  // slowly.
  CUtensorMap q_map, k_map, v_map;
  bool q_mapped, k_mapped, v_mapped;
};

}  // namespace sagebwd::cuda::sm90
