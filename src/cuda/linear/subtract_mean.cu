// SPDX-License-Identifier: Apache-2.0
#include <type_traits>

#include "cuda/host/launch.h"
#include "cuda/linear/rows.cuh"

namespace sagebwd::cuda::linear {
namespace {

constexpr int kThreads = 256;

/// A thread takes eight channels of a token.
template <typename T, int D>
__global__ void __launch_bounds__(kThreads)
    subtract_mean_kernel(const __grid_constant__ SubtractMeanJob p) {
  constexpr int kLanes = D / 8;
  const int head = static_cast<int>(blockIdx.y),
            channel = static_cast<int>(threadIdx.x) % kLanes * 8;
  const int token =
      static_cast<int>(blockIdx.x) * (kThreads / kLanes) + static_cast<int>(threadIdx.x) / kLanes;
  if (token >= p.dk.count) return;
  const float* g = p.g + (static_cast<int64_t>(head) * p.dk.count + token) * D + channel;
  const float* mean = p.mean + head * D + channel;
  float x[8];
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const float4 a = reinterpret_cast<const float4*>(g)[half],
                 b = reinterpret_cast<const float4*>(mean)[half];
    x[4 * half] = a.x - b.x, x[4 * half + 1] = a.y - b.y;
    x[4 * half + 2] = a.z - b.z, x[4 * half + 3] = a.w - b.w;
  }
  T* const to = row_of<T>(p.dk.x, p.dk, head, token) + channel;
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
           kThreads, 0, job, kind.stream);
  });
}

}  // namespace sagebwd::cuda::linear
