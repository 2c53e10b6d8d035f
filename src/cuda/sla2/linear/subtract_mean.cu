// SPDX-License-Identifier: Apache-2.0
#include <type_traits>

#include "cuda/host/launch.h"
#include "cuda/sla2/linear/rows.cuh"

namespace sagebwd::cuda::sla2::linear {
namespace {

constexpr int kThreads = 256;

/// A thread takes eight channels of a token.
template <typename T, int D>
__global__ void __launch_bounds__(kThreads)
    subtract_mean_kernel(const __grid_constant__ SubtractMeanJob p) {
  constexpr int kLanes = D / 8;
  take_turn();
  const int head = static_cast<int>(blockIdx.y),
            channel = static_cast<int>(threadIdx.x) % kLanes * 8;
  const int token =
      static_cast<int>(blockIdx.x) * (kThreads / kLanes) + static_cast<int>(threadIdx.x) / kLanes;
  if (token >= p.dk.count) return;
  const float* mean = p.mean + head * D + channel;
  T* const to = row_of<T>(p.dk.x, p.dk, head, token) + channel;
  float x[8];
  if (p.g == nullptr) {
    unpack_chunk<T>(x, load_chunk(to, p.dk.x.vector));
  } else {
    const float4* const g = reinterpret_cast<const float4*>(
        p.g + (static_cast<int64_t>(head) * p.dk.count + token) * D + channel);
    const float4 low = g[0], high = g[1];
    x[0] = low.x, x[1] = low.y, x[2] = low.z, x[3] = low.w;
    x[4] = high.x, x[5] = high.y, x[6] = high.z, x[7] = high.w;
  }
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const float4 m = reinterpret_cast<const float4*>(mean)[half];
    x[4 * half] -= m.x, x[4 * half + 1] -= m.y, x[4 * half + 2] -= m.z, x[4 * half + 3] -= m.w;
  }
  const uint4 chunk = pack_chunk<T>(x);
  if (p.dk.x.vector) {
    *reinterpret_cast<uint4*>(to) = chunk;
    return;
  }
  const T* from = reinterpret_cast<const T*>(&chunk);
#pragma unroll
  for (int i = 0; i < 8; ++i) to[i] = from[i];
}

}  // namespace

void launch_subtract_mean(const Kind& kind, const SubtractMeanJob& job) {
  dispatch(kind, [&](auto type, auto d) {
    constexpr int kRows = kThreads / (d() / 8);
    launch(subtract_mean_kernel<decltype(type), d()>,
           dim3(static_cast<unsigned>((job.dk.count + kRows - 1) / kRows),
                static_cast<unsigned>(job.dk.heads)),
           kThreads, 0, job, kind.stream, kind.start);
  });
}

}  // namespace sagebwd::cuda::sla2::linear
