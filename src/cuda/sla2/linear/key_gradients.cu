// SPDX-License-Identifier: Apache-2.0
#include "cuda/sla2/linear/tokens.cuh"

namespace sagebwd::cuda::sla2::linear {
template <typename T, int D, bool kAdds>
__global__ void __launch_bounds__(kTokenThreads, 2)
    key_gradients_kernel(const __grid_constant__ KeyGradientsJob p) {
  extern __shared__ __align__(128) uint8_t memory[];
  take_turn();
  TokenBlock<T, D> me(memory, p.queries);
  me.copy(me.shared.x_mean, p.k_mean == nullptr ? nullptr : p.k_mean + me.head * D);
  me.copy(me.shared.partner_mean, p.v_mean + me.head * D);
  me.copy(me.shared.extra_sum, p.extra_sum + me.block * D);
  me.load(p.queries, p.k, &p.v);

  Fragment<D> phi;
  me.features(phi);
  {
    Fragment<D> out = {};
    float norm[2];
    me.norms(norm, phi);
    const float inverse[2] = {inverse_or_zero(norm[0]), inverse_or_zero(norm[1])};
    me.wait_for_averages();
    if constexpr (kAdds) me.load_over_x(p.dv_sparse);
    me.average_of(out, phi, inverse);
#pragma unroll
    for (int n = 0; n < D / 8; ++n) {
      const float2 mean = me.channels_of(me.shared.mean, n);
#pragma unroll
      for (int i = 0; i < 4; ++i)
        out[n][i] = norm[i / 2] == 0.0f
                        ? 0.0f
                        : norm[i / 2] * ((i % 2 == 0 ? mean.x : mean.y) + me.scale * out[n][i]);
    }
    if constexpr (kAdds) {
      me.add_x(out);
      __syncthreads();  // everybody is done with it
      me.load_over_x(p.dk_sparse);
    }
    me.store(p.dv, p.k, out);
  }

  // g becomes the gradient of φ, and then that of K without its mean.
  Fragment<D> g = {};
  float dot[2], total[2] = {0.0f, 0.0f};
  me.against_averages(g, dot);
#pragma unroll
  for (int n = 0; n < D / 8; ++n) {
    const float2 sum = me.channels_of(me.shared.sum, n),
                 extra = me.channels_of(me.shared.extra_sum, n);
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      g[n][i] =
          (i % 2 == 0 ? sum.x : sum.y) * (g[n][i] + dot[i / 2]) + (i % 2 == 0 ? extra.x : extra.y);
      total[i / 2] += phi[n][i] * g[n][i];
    }
  }
  bool counts[2];  // in the sum of g
  int count = 0;   // tokens in the mean of K: features of others are NaN
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    total[half] = quad_sum(total[half]), counts[half] = me.token(half) < p.k.count;
    count += counts[half] && phi[0][2 * half] <= FLT_MAX ? 1 : 0;
  }
#pragma unroll
  for (int n = 0; n < D / 8; ++n)
#pragma unroll
    for (int i = 0; i < 4; ++i) g[n][i] = phi[n][i] * (g[n][i] - total[i / 2]);

  if (p.k_mean != nullptr) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      float* const row = p.g + (static_cast<int64_t>(me.head) * p.k.count + me.token(half)) * D;
      bool finite = true;
#pragma unroll
      for (int n = 0; n < D / 8; ++n) {
        if (p.g != nullptr && counts[half])
          *reinterpret_cast<float2*>(row + me.channel(n)) = {g[n][2 * half], g[n][2 * half + 1]};
        finite = finite && fabsf(g[n][2 * half]) <= FLT_MAX && fabsf(g[n][2 * half + 1]) <= FLT_MAX;
      }
      const uint32_t quad = __ballot_sync(kAllLanes, finite) >> (me.lane & ~3u) & 15u;
      counts[half] = counts[half] && quad == 15u;
    }
    __syncthreads();  // everybody is done with the partners; sums of the warps take their place
    float(*const sums)[D] = reinterpret_cast<float(*)[D]>(me.shared.partner);
    int* const counted = reinterpret_cast<int*>(sums + kTokenThreads / 32);
#pragma unroll
    for (int step = 4; step < 32; step *= 2) count += __shfl_xor_sync(kAllLanes, count, step);
    if (me.lane == 0) counted[me.warp] = count;
#pragma unroll
    for (int n = 0; n < D / 8; ++n)
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        float sum = (counts[0] ? g[n][i] : 0.0f) + (counts[1] ? g[n][2 + i] : 0.0f);
#pragma unroll
        for (int step = 4; step < 32; step *= 2) sum += __shfl_xor_sync(kAllLanes, sum, step);
        if (me.lane < 4) sums[me.warp][me.channel(n) + i] = sum;
      }
    __syncthreads();
    const int64_t part = static_cast<int64_t>(me.head) * p.g_mean.parts + blockIdx.x;
    for (int c = static_cast<int>(threadIdx.x); c < D; c += kTokenThreads) {
      float sum = 0.0f;
      for (int w = 0; w < kTokenThreads / 32; ++w) sum += sums[w][c];
      p.g_mean.part[part * D + c] = sum * kSmall;
    }
    if (threadIdx.x == 0) {
      for (int w = 1; w < kTokenThreads / 32; ++w) count += counted[w];
      p.g_mean.counted[part] = count;
    }
  }
  if (p.g != nullptr) return;
  if constexpr (kAdds) me.add_x(g);
  me.store(p.dk, p.k, g);
}

void launch_key_gradients(const Kind& kind, const KeyGradientsJob& job) {
  dispatch_mixed(kind, job.dk_sparse.x.data != nullptr, [&](auto type, auto d, auto adds) {
    launch(key_gradients_kernel<decltype(type), d(), adds()>, grid_of(job.k), kTokenThreads,
           sizeof(TokenShared<d()>), job, kind.stream, kind.start);
  });
}

}  // namespace sagebwd::cuda::sla2::linear
