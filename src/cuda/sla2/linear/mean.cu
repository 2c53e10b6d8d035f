// SPDX-License-Identifier: Apache-2.0
// Means of tokens: a thread block adds up a span of them, another adds up the spans in order.
#include <algorithm>
#include <type_traits>

#include "cuda/host/launch.h"
#include "cuda/sla2/linear/rows.cuh"

namespace sagebwd::cuda::sla2::linear {
namespace {

constexpr int kThreads = 256, kSpan = 256, kWarps = kThreads / 32;

template <typename T, int D>
__global__ void __launch_bounds__(kThreads) mean_parts_kernel(const __grid_constant__ MeanJob job) {
  constexpr int kLanes = D / 8, kRows = kThreads / kLanes;  // lanes of a row, rows at once
  __shared__ float sums[kWarps][D];
  __shared__ int counted_of[kWarps];
  take_turn();
  const int thread = static_cast<int>(threadIdx.x), lane = thread % 32, warp = thread / 32;
  const int head = static_cast<int>(blockIdx.y), first = static_cast<int>(blockIdx.x) * kSpan;
  const int channel = lane % kLanes * 8, row = thread / kLanes;
  const MeanJob::Of& p = job.of[blockIdx.z];
  if (head >= p.x.heads || first >= p.x.count) return;
  const T* from = row_of<T>(p.x, head, first) + channel;
  float sum[8] = {};
  int counted = 0;
  const int end = min(kSpan, p.x.count - first);
#pragma unroll 4
  for (int at = 0; at < kSpan; at += kRows) {
    const bool real = at + row < end;
    uint4 chunk = make_uint4(0, 0, 0, 0);
    if (real) chunk = load_chunk(from + (at + row) * p.x.x.token, p.x.x.vector);
    float x[8];
    unpack_chunk<T>(x, chunk);
    bool finite = true;
#pragma unroll
    for (int i = 0; i < 8; ++i) finite = finite && fabsf(x[i]) <= FLT_MAX;
    const uint32_t good = __ballot_sync(kAllLanes, finite) >> (lane / kLanes * kLanes);
    constexpr uint32_t kAllOfRow = (1u << kLanes) - 1;
    if (!real || (good & kAllOfRow) != kAllOfRow) continue;
    ++counted;
#pragma unroll
    for (int i = 0; i < 8; ++i) sum[i] += x[i] * kSmall;
  }
#pragma unroll
  for (int i = 0; i < 8; ++i) {
#pragma unroll
    for (int step = kLanes; step < 32; step *= 2)
      sum[i] += __shfl_xor_sync(kAllLanes, sum[i], step);
    if (lane < kLanes) sums[warp][channel + i] = sum[i];
  }
#pragma unroll
  for (int step = kLanes; step < 32; step *= 2)
    counted += __shfl_xor_sync(kAllLanes, counted, step);
  if (lane == 0) counted_of[warp] = counted;
  __syncthreads();
  const int64_t part =
      head / p.group * p.mean.parts + head % p.group * (p.mean.parts / p.group) + blockIdx.x;
  if (thread < D) {
    float total = 0.0f;
    for (int w = 0; w < kWarps; ++w) total += sums[w][thread];
    p.mean.part[part * D + thread] = total;
  }
  if (thread == 0) {
    counted = 0;
    for (int w = 0; w < kWarps; ++w) counted += counted_of[w];
    p.mean.counted[part] = counted;
  }
}

constexpr int kWays = 8;  // threads that share a channel

template <int D>
__device__ void add_up(const Mean& p) {
  __shared__ double sums[kWays][D];
  const int c = static_cast<int>(threadIdx.x) % D, way = static_cast<int>(threadIdx.x) / D;
  const int64_t head = blockIdx.x, base = head * p.parts;
  double sum = 0;
#pragma unroll 8
  for (int64_t part = way; part < p.parts; part += kWays)
    sum += static_cast<double>(p.part[(base + part) * D + c]);
  sums[way][c] = sum;
  __shared__ int counted;
  if (threadIdx.x < 32) {
    int count = 0;
    for (int64_t part = threadIdx.x; part < p.parts; part += 32) count += p.counted[base + part];
#pragma unroll
    for (int step = 1; step < 32; step *= 2) count += __shfl_xor_sync(kAllLanes, count, step);
    if (threadIdx.x == 0) counted = count;
  }
  __syncthreads();
  if (way != 0) return;
  for (int w = 1; w < kWays; ++w) sum += sums[w][c];
  const double divisor = static_cast<double>(counted) * double{kSmall};
  p.mean[head * D + c] = counted > 0 ? static_cast<float>(sum / divisor) : 0.0f;
}

template <int D>
__global__ void __launch_bounds__(kWays* D) mean_kernel(const __grid_constant__ Mean p) {
  take_turn();
  add_up<D>(p);
}
template <int D>
__global__ void __launch_bounds__(kWays* D) means_kernel(const __grid_constant__ MeanJob p) {
  take_turn();
  const MeanJob::Of& of = p.of[blockIdx.y];
  if (static_cast<int>(blockIdx.x) * of.group < of.x.heads) add_up<D>(of.mean);
}

}  // namespace

int64_t mean_parts(int64_t tokens) { return (tokens + kSpan - 1) / kSpan; }

void launch_means(const Kind& kind, const MeanJob& job) {
  int64_t spans = 0, heads = 0, key_heads = 0;
  for (int i = 0; i < job.count; ++i) {
    const MeanJob::Of& of = job.of[i];
    spans = std::max(spans, mean_parts(of.x.count));
    heads = std::max<int64_t>(heads, of.x.heads);
    key_heads = std::max<int64_t>(key_heads, of.x.heads / of.group);
  }
  const unsigned count = static_cast<unsigned>(job.count);
  dispatch(kind, [&](auto type, auto d) {
    launch(mean_parts_kernel<decltype(type), d()>,
           dim3(static_cast<unsigned>(spans), static_cast<unsigned>(heads), count), kThreads, 0,
           job, kind.stream, kind.start);
    launch(means_kernel<d()>, dim3(static_cast<unsigned>(key_heads), count), kWays * d(), 0, job,
           kind.stream, kind.start);
  });
}

void launch_mean_of_parts(const Kind& kind, int key_heads, const Mean& mean) {
  const dim3 grid(static_cast<unsigned>(key_heads));
  if (kind.d == 64)
    launch(mean_kernel<64>, grid, kWays * 64, 0, mean, kind.stream, kind.start);
  else
    launch(mean_kernel<128>, grid, kWays * 128, 0, mean, kind.stream, kind.start);
}

}  // namespace sagebwd::cuda::sla2::linear
