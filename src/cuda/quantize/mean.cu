// SPDX-License-Identifier: Apache-2.0
// Means of K and V per sequence and key head. One thread block per block of tokens adds it up in
// FP64, a second kernel adds the blocks of a sequence in order: the result does not depend on
// scheduling.
#include "cuda/host/launch.h"
#include "cuda/quantize/quantize.h"
#include "cuda/quantize/rows.cuh"

namespace sagebwd::cuda {
namespace {

template <typename T, int D>
__global__ void __launch_bounds__(RowShape<D>::kThreads) mean_part_kernel(MeanJob job) {
  using Shape = RowShape<D>;
  __shared__ double sums[Shape::kRows][D];
  __shared__ int counts[Shape::kRows];
  const int block = blockIdx.x, head = blockIdx.y;
  const int row = threadIdx.x / Shape::kLanes, channel = threadIdx.x % Shape::kLanes * 8;
  const tile::Sequence s = tile::sequence_of_block(job.seq, block, false);
  const int first = static_cast<int>(static_cast<int64_t>(block) * kBlock - s.k_pad);

  double sum[8] = {};
  int count = 0;
  Chunk<T> chunk[Shape::kSteps];
#pragma unroll
  for (int step = 0; step < Shape::kSteps; ++step) {
    const int token = first + step * Shape::kRows + row;
    chunk[step].bits = make_uint4(0, 0, 0, 0);
    if (token < s.nk && channel < job.d)
      chunk[step] = load_chunk(tile::row_of<const T>(job.x, s, head, s.k_begin + token), channel,
                               job.x.vector);
  }
#pragma unroll
  for (int step = 0; step < Shape::kSteps; ++step) {
    float x[8];
    chunk[step].unpack(x);
    bool bad = false;
#pragma unroll
    for (int e = 0; e < 8; ++e) bad |= !numerics::is_finite(x[e]);
    if (row_any<Shape::kLanes>(bad) || first + step * Shape::kRows + row >= s.nk) continue;
    ++count;
#pragma unroll
    for (int e = 0; e < 8; ++e) sum[e] += static_cast<double>(x[e]);
  }
#pragma unroll
  for (int e = 0; e < 8; ++e) sums[row][channel + e] = sum[e];
  if (channel == 0) counts[row] = count;
  __syncthreads();

  const int64_t part = static_cast<int64_t>(head) * job.num_blocks + block;
  if (threadIdx.x < D) {
    double total = 0;
    for (int r = 0; r < Shape::kRows; ++r) total += sums[r][threadIdx.x];
    job.part[part * D + threadIdx.x] = total;
  }
  if (threadIdx.x == 0) {
    int total = 0;
    for (int r = 0; r < Shape::kRows; ++r) total += counts[r];
    job.tokens[part] = total;
  }
}

template <int D>
__global__ void __launch_bounds__(RowShape<D>::kThreads) mean_kernel(MeanJob job) {
  constexpr int kParts = RowShape<D>::kThreads / D;
  __shared__ double sums[kParts][D];
  __shared__ int64_t counts[kParts];
  const int head = blockIdx.y, c = threadIdx.x % D, way = threadIdx.x / D;
  const tile::Sequence s = tile::sequence_at(job.seq, blockIdx.x);
  const int first = static_cast<int>(s.k_pad / kBlock), blocks = (s.nk + kBlock - 1) / kBlock;
  const int64_t base = static_cast<int64_t>(head) * job.num_blocks + first;
  double sum = 0;
  int64_t count = 0;
#pragma unroll 4
  for (int b = way; b < blocks; b += kParts) {
    sum += job.part[(base + b) * D + c];
    count += job.tokens[base + b];
  }
  sums[way][c] = sum;
  if (c == 0) counts[way] = count;
  __syncthreads();
  if (way != 0) return;
  for (int w = 1; w < kParts; ++w) sum += sums[w][c], count += counts[w];
  job.mean[(static_cast<int64_t>(blockIdx.x) * job.hk + head) * D + c] =
      count > 0 ? static_cast<float>(sum / static_cast<double>(count)) : 0.0f;
}

template <typename T, int D>
void run(const MeanJob& job, cudaStream_t stream) {
  const auto heads = static_cast<unsigned>(job.hk);
  launch(mean_part_kernel<T, D>, dim3(static_cast<unsigned>(job.num_blocks), heads),
         RowShape<D>::kThreads, 0, job, stream);
  launch(mean_kernel<D>, dim3(static_cast<unsigned>(job.seq.count), heads), RowShape<D>::kThreads,
         0, job, stream);
}

}  // namespace

void launch_mean(const MeanJob& job, Dtype dtype, cudaStream_t stream) {
  if (dtype == Dtype::bf16)
    job.padded_d == 64 ? run<__nv_bfloat16, 64>(job, stream) : run<__nv_bfloat16, 128>(job, stream);
  else
    job.padded_d == 64 ? run<__half, 64>(job, stream) : run<__half, 128>(job, stream);
}

}  // namespace sagebwd::cuda
