// SPDX-License-Identifier: Apache-2.0
// Which kernels make a backward.
#include "cuda/sm80/bwd/bwd.h"
#include "cuda/sm80/bwd/launch.h"

namespace sagebwd::cuda::sm80 {

void launch_backward(const BackwardParams& p, Dtype dtype, Scheme scheme, uint32_t dithered,
                     int padded_d, int k_blocks, cudaStream_t stream) {
  const BackwardCall call{p, dtype, padded_d, k_blocks, stream};
  if (p.lists.entries != nullptr) {
    launch_listed(call);
    launch_piece_sums(call);
  } else if (p.cap.on()) {
    launch_capped(call);
  } else if (dithered != 0) {
    scheme == Scheme::paper ? launch_dithered(call) : launch_dithered_dq(call);
  } else if (wants_general(p)) {
    launch_general(call, scheme);
  } else {
    launch_fast(call, scheme);
  }
}

}  // namespace sagebwd::cuda::sm80
