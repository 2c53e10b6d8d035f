// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cuda.h>

#include <cstdint>

#include "cuda/sm90/formats.h"
#include "cuda/tuned/operands.h"

namespace sagebwd::cuda::sm90 {

using tuned::CentreRows, tuned::MeanJob;

/// All operands of a forward, or the codes that a backward reads. Outputs that are null are not
/// made.
struct CodesJob : tuned::OperandJob {
  // k_scale is written in blocks with a poisoned key alone.
  BlockScales* block_scales = nullptr;  // [hk, tk / kBlock]
  uint16_t* v_share = nullptr;          // [hk, tk], halves in the order of tile::permuted
  // Recipe `tokenwise` has these instead of the three above.
  KeyScales scales = KeyScales::block;
  CentreRows centre_rows;
  bool centres_are_zero = false;  // the recipe has none
  KeyNumbers* numbers = nullptr;  // [hk, tk / kBlock]
  // Maps for copies of whole blocks. Tensors that no map can describe have none, and are copied
  // slowly.
  CUtensorMap q_map, k_map, v_map;
  bool q_mapped, k_mapped, v_mapped;
};

}  // namespace sagebwd::cuda::sm90
