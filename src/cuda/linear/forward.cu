// SPDX-License-Identifier: Apache-2.0
#include <cstddef>

#include "cuda/linear/tokens.cuh"

namespace sagebwd::cuda::linear {
template <typename T, int D>
__global__ void __launch_bounds__(kTokenThreads, 3)
    forward_kernel(const __grid_constant__ ForwardJob p) {
  extern __shared__ __align__(128) uint8_t memory[];
  TokenBlock<T, D> me(memory, p.keys);
  me.copy(me.shared.x_mean, nullptr);
  me.load(p.keys, p.q, nullptr);

  Fragment<D> phi, out = {};
  float norm[2];
  me.features(phi);
  me.norms(norm, phi);
  const float inverse[2] = {inverse_or_zero(norm[0]), inverse_or_zero(norm[1])};
  me.wait_for_averages();
  me.average_of(out, phi, inverse);
  me.store(p.o, p.q, [&](int n, int half) -> float2 {
    const float2 mean = me.channels_of(me.shared.mean, n);
    if (norm[half] == 0.0f) return {0.0f, 0.0f};
    return {mean.x + me.scale * out[n][2 * half], mean.y + me.scale * out[n][2 * half + 1]};
  });
  if (p.norm.data == nullptr || me.lane % 4 != 0) return;
#pragma unroll
  for (int half = 0; half < 2; ++half)
    if (me.token(half) < p.q.count) *stat_of(p.norm, p.q, me.head, me.token(half)) = norm[half];
}

void launch_forward(const Kind& kind, const ForwardJob& job) {
  dispatch(kind, [&](auto type, auto d) {
    launch(forward_kernel<decltype(type), d()>, grid_of(job.q), kTokenThreads,
           offsetof(TokenShared<d()>, partner), job, kind.stream);
  });
}

}  // namespace sagebwd::cuda::linear
