// SPDX-License-Identifier: Apache-2.0
#include "cuda/linear/tokens.cuh"

namespace sagebwd::cuda::linear {
template <typename T, int D>
__global__ void __launch_bounds__(kTokenThreads, 3)
    query_gradients_kernel(const __grid_constant__ QueryGradientsJob p) {
  extern __shared__ __align__(128) uint8_t memory[];
  TokenBlock<T, D> me(memory, p.keys);
  me.copy(me.shared.x_mean, nullptr);
  me.copy(me.shared.partner_mean, nullptr);
  me.load(p.keys, p.q, &p.dout);

  Fragment<D> phi, g = {};
  float norm[2], unused[2];
  me.features(phi);
  me.norms(norm, phi);
  me.wait_for_averages();
  me.against_averages(g, unused);

  float inverse[2], of_norm[2], d[2] = {0.0f, 0.0f};  // of_norm: n·dn
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    inverse[half] = inverse_or_zero(norm[half]), of_norm[half] = 0.0f;
    if (p.dnorm.data != nullptr && norm[half] != 0.0f && me.token(half) < p.q.count)
      of_norm[half] = norm[half] * *stat_of(p.dnorm, p.q, me.head, me.token(half));
  }
  const auto u = [&](int n, int i) {
    const float2 sum = me.channels_of(me.shared.sum, n);
    return phi[n][i] * (i % 2 == 0 ? sum.x : sum.y) * inverse[i / 2];
  };
#pragma unroll
  for (int n = 0; n < D / 8; ++n)
#pragma unroll
    for (int i = 0; i < 4; ++i) d[i / 2] += u(n, i) * g[n][i];
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    d[half] = quad_sum(d[half]);
    if (me.lane % 4 != 0 || me.token(half) >= p.q.count) continue;
    const int64_t at = static_cast<int64_t>(me.head) * p.q.count + me.token(half);
    p.weight[at] = inverse[half];
    p.extra[at] = norm[half] == 0.0f ? 0.0f : of_norm[half] - d[half];
  }
  me.store(p.dq, p.q, [&](int n, int half) -> float2 {
    const auto gradient = [&](int i) {
      const float share = u(n, i);
      return share * (g[n][i] - d[half]) + of_norm[half] * (share - phi[n][i]);
    };
    if (norm[half] == 0.0f) return {0.0f, 0.0f};
    return {gradient(2 * half), gradient(2 * half + 1)};
  });
}

void launch_query_gradients(const Kind& kind, const QueryGradientsJob& job) {
  dispatch(kind, [&](auto type, auto d) {
    launch(query_gradients_kernel<decltype(type), d()>, grid_of(job.q), kTokenThreads,
           sizeof(TokenShared<d()>), job, kind.stream);
  });
}

}  // namespace sagebwd::cuda::linear
