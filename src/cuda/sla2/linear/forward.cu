// SPDX-License-Identifier: Apache-2.0
#include <cstddef>

#include "cuda/sla2/linear/tokens.cuh"

namespace sagebwd::cuda::sla2::linear {
template <typename T, int D, bool kMixed>
__global__ void __launch_bounds__(kTokenThreads, 3)
    forward_kernel(const __grid_constant__ ForwardJob p) {
  extern __shared__ __align__(128) uint8_t memory[];
  take_turn();
  TokenBlock<T, D> me(memory, p.keys);
  me.copy(me.shared.x_mean, nullptr);
  me.load(p.keys, p.q, kMixed ? &p.sparse : nullptr);

  Fragment<D> phi, out = {};
  float norm[2];
  me.features(phi);
  me.norms(norm, phi);
  const float inverse[2] = {inverse_or_zero(norm[0]), inverse_or_zero(norm[1])};
  me.wait_for_averages();
  me.average_of(out, phi, inverse);
#pragma unroll
  for (int n = 0; n < D / 8; ++n) {
    const float2 mean = me.channels_of(me.shared.mean, n);
#pragma unroll
    for (int i = 0; i < 4; ++i)
      out[n][i] =
          norm[i / 2] == 0.0f ? 0.0f : (i % 2 == 0 ? mean.x : mean.y) + me.scale * out[n][i];
  }
  if constexpr (kMixed) {
    const float alpha = alpha_of(p.mix, p.q, me.head, me.first);
    me.for_words(me.shared.partner, [&](int n, int half, uint32_t word) {
      const float2 sparse = unpack_16<T>(word);
      float &x = out[n][2 * half], &y = out[n][2 * half + 1];
      const bool left = norm[half] != 0.0f;  // any key
      x = left ? alpha * sparse.x + (1.0f - alpha) * x : sparse.x;
      y = left ? alpha * sparse.y + (1.0f - alpha) * y : sparse.y;
    });
  }
  me.store(p.o, p.q, out);
  if (p.norm.data == nullptr || me.lane % 4 != 0) return;
#pragma unroll
  for (int half = 0; half < 2; ++half)
    if (me.token(half) < p.q.count) *stat_of(p.norm, p.q, me.head, me.token(half)) = norm[half];
}

void launch_forward(const Kind& kind, const ForwardJob& job) {
  dispatch_mixed(kind, job.mix.alpha != nullptr, [&](auto type, auto d, auto mixed) {
    using Shared = TokenShared<d()>;
    launch(forward_kernel<decltype(type), d(), mixed()>, grid_of(job.q), kTokenThreads,
           mixed() ? sizeof(Shared) : offsetof(Shared, partner), job, kind.stream, kind.start);
  });
}

}  // namespace sagebwd::cuda::sla2::linear
