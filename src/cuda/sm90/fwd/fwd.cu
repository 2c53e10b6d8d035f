// SPDX-License-Identifier: Apache-2.0
#include <algorithm>

#include "cuda/host/device.h"
#include "cuda/host/instance.h"
#include "cuda/host/launch.h"
#include "cuda/sm90/fwd/fwd.h"
#include "cuda/sm90/fwd/kernel.cuh"

namespace sagebwd::cuda::sm90 {
namespace {

template <typename T, int D>
void run(const ForwardParams& p, cudaStream_t stream) {
  const int64_t pieces = fwd::Numbers(p).of_all_heads(p);
  launch(forward_kernel<T, D>,
         dim3(static_cast<unsigned>(std::min<int64_t>(pieces, multiprocessors()))), fwd::kThreads,
         static_cast<int>(sizeof(fwd::SharedPlan<D>)), p, stream, Start::early);
}

}  // namespace

void launch_forward(const ForwardParams& p, Dtype dtype, int d, cudaStream_t stream) {
  static_assert(kForwardQueries == fwd::kQueries && kForwardKeys == fwd::kKeys);
  with_instance(dtype, d, [&]<typename T, int D>() { run<T, D>(p, stream); });
}

}  // namespace sagebwd::cuda::sm90
