// SPDX-License-Identifier: Apache-2.0
// Which kernels make a backward.
#include "cuda/host/target.h"
#include "cuda/sm80/bwd/bwd.h"
#include "cuda/sm80/bwd/launch.h"

namespace sagebwd::cuda::sm80 {

void launch_backward(BackwardParams p, Dtype dtype, bool paper, bool dithers_dq, int padded_d,
                     int k_blocks, cudaStream_t stream) {
  p.general = p.turns != nullptr || p.row_sum != nullptr || !made_for_hopper();
  const BackwardCall call{p, dtype, padded_d, k_blocks, stream};
  if (p.lists.entries != nullptr) {
    launch_listed(call);
    launch_piece_sums(call);
  } else if (p.cap.on()) {
    launch_capped(call);
  } else if (dithers_dq) {
    launch_dithered_dq(call);
  } else {
    paper ? launch_paper(call) : launch_vectorwise(call);
  }
}

}  // namespace sagebwd::cuda::sm80
