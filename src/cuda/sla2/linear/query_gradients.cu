// SPDX-License-Identifier: Apache-2.0
#include "cuda/sla2/linear/tokens.cuh"

namespace sagebwd::cuda::sla2::linear {
template <typename T, int D, bool kMixed>
__global__ void __launch_bounds__(kTokenThreads, 3)
    query_gradients_kernel(const __grid_constant__ QueryGradientsJob p) {
  extern __shared__ __align__(128) uint8_t memory[];
  take_turn();
  TokenBlock<T, D> me(memory, p.keys);
  me.copy(me.shared.x_mean, nullptr);
  me.copy(me.shared.partner_mean, nullptr);
  me.load(p.keys, p.q, &p.dout);

  Fragment<D> phi, g = {};
  float norm[2], dot[2];  // dot: of dO and the mean of V
  me.features(phi);
  me.norms(norm, phi);
  me.wait_for_averages();
  if constexpr (kMixed) me.load_over_x(p.dq_sparse);
  me.against_averages(g, dot);

  float inverse[2], of_norm[2], d[2] = {0.0f, 0.0f};  // of_norm: n·dn
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    inverse[half] = inverse_or_zero(norm[half]), of_norm[half] = 0.0f;
    if (p.dnorm.data != nullptr && norm[half] != 0.0f && me.token(half) < p.q.count)
      of_norm[half] = norm[half] * *stat_of(p.dnorm, p.q, me.head, me.token(half));
  }
  float rest = 1.0f;  // of α
  if constexpr (kMixed) rest -= alpha_of(p.mix, p.q, me.head, me.first);
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
    p.weight[at] = rest * inverse[half];
    p.extra[at] = norm[half] == 0.0f ? 0.0f : of_norm[half] - d[half];
  }
#pragma unroll
  for (int n = 0; n < D / 8; ++n)
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const float share = u(n, i);
      g[n][i] = rest * (share * (g[n][i] - d[i / 2])) + of_norm[i / 2] * (share - phi[n][i]);
      if (norm[i / 2] == 0.0f) g[n][i] = 0.0f;
    }
  if constexpr (kMixed) {
    if (p.parts != nullptr) {
      // The rows' dO·O; a row is in four lanes.
      float sum = 0.0f;
#pragma unroll
      for (int half = 0; half < 2; ++half)
        if (norm[half] != 0.0f && me.token(half) < p.q.count) sum += d[half] + dot[half];
#pragma unroll
      for (int step = 4; step < 32; step *= 2) sum += __shfl_xor_sync(kAllLanes, sum, step);
      if (me.lane == 0) me.shared.extra_sum[me.warp] = sum;
      __syncthreads();
      if (threadIdx.x == 0) {
        sum = 0.0f;
        for (int w = 0; w < kTokenThreads / 32; ++w) sum += me.shared.extra_sum[w];
        const int64_t at = (p.q.first + me.head) * gridDim.x + blockIdx.x;
        p.parts[at] = p.parts_of_sparse[at] - sum;
      }
    }
    me.add_x(g);
  }
  me.store(p.dq, p.q, g);
}

void launch_query_gradients(const Kind& kind, const QueryGradientsJob& job) {
  dispatch_mixed(kind, job.mix.alpha != nullptr, [&](auto type, auto d, auto mixed) {
    launch(query_gradients_kernel<decltype(type), d(), mixed()>, grid_of(job.q), kTokenThreads,
           sizeof(TokenShared<d()>), job, kind.stream, kind.start);
  });
}

}  // namespace sagebwd::cuda::sla2::linear
