// SPDX-License-Identifier: Apache-2.0
#include <algorithm>

#include "cuda/host/device.h"
#include "cuda/host/instance.h"
#include "cuda/host/launch.h"
#include "cuda/sm90/fwd/fwd.h"
#include "cuda/sm90/fwd/listed/kernel.cuh"

namespace sagebwd::cuda::sm90 {
void launch_listed_forward(const ListedParams& p, Dtype dtype, cudaStream_t stream) {
  static_assert(kListedForwardQueries == fwd::listed::kQueries &&
                kListedForwardKeys == fwd::listed::kHalf);
  using Plan = fwd::listed::SharedPlan<kListedForwardD>;
  const int64_t pieces = static_cast<int64_t>(p.q_blocks) * p.h;
  with_type(dtype, [&]<typename T>() {
    launch(listed_forward_kernel<T, kListedForwardD>,
           dim3(static_cast<unsigned>(std::min<int64_t>(pieces, multiprocessors()))),
           fwd::listed::kThreads, static_cast<int>(sizeof(Plan)), p, stream, Start::early);
  });
}

}  // namespace sagebwd::cuda::sm90
