// SPDX-License-Identifier: Apache-2.0
// Choices of the fused backward with which the compiler finds enough registers on each target.
#pragma once

#include "cuda/arch/target.cuh"
#include "cuda/sm80/bwd/fused/shape.cuh"

namespace sagebwd::cuda::sm80 {

struct FusedChoices {
  bool whole_addresses;  // fragment addresses hold all but a constant, not only the lane's part
  bool with_start;       // sums of dV and dK are added with their start (tile/codes.cuh)
  bool keeps_codes;      // a warp reads only the others' codes from shared memory
  bool mixed;            // S and P of the next tile go with the products of this one
  // Addresses that are worked out again in every round, beside those of queries.
  bool forgets_keys, forgets_transposed;
  bool work_in_shared;                // what the loop needs of FusedWork is not in registers
  bool dq_first;                      // before dV and dK
  bool dv_apart, dk_apart, dq_apart;  // products that may not mix with others
};

/// sm_90 has what is fastest there; elsewhere it is what does without spills, found by trying.
constexpr FusedChoices fused_choices(int target, bool wide, bool paper, bool holds) {
  FusedChoices c{.whole_addresses = wide && !paper,
                 .with_start = wide && !paper,
                 .keeps_codes = !wide && !paper,
                 .mixed = !(wide && paper),
                 .forgets_keys = !wide || paper,
                 .forgets_transposed = wide,
                 .work_in_shared = false,
                 .dq_first = !wide && !paper && !holds,
                 .dv_apart = false,
                 .dk_apart = false,
                 .dq_apart = false};
  if (paper && (wide || holds)) return c;
  const auto forget_transposed = [&] { c.forgets_keys = false, c.forgets_transposed = true; };
  if (target < 900) {
    c.mixed = false, c.dv_apart = wide;
  } else if (target / 100 == 10) {
    c.dk_apart = true;
    (paper ? c.dq_apart : c.dv_apart) = true;
    if (!wide) c.mixed = c.dq_first = false, c.work_in_shared = true, forget_transposed();
  } else if (target / 100 == 12) {
    if (wide)
      c.whole_addresses = false;
    else
      c.dv_apart = true, forget_transposed();
  }
  return c;
}

template <class Shape>
inline constexpr FusedChoices kFusedChoices = fused_choices(arch::kTarget, Shape::D == 128,
                                                            Shape::kPaper, Shape::kHolds);

}  // namespace sagebwd::cuda::sm80
