// SPDX-License-Identifier: Apache-2.0
// The mean that is taken out of K where dQ is made of it (DqKeys), but in `paper`. It is that
// of at most kMostSampled keys, made again from their codes: one thread block has them all.
#include "cuda/arch/kernel_order.cuh"
#include "cuda/host/instance.h"
#include "cuda/host/launch.h"
#include "cuda/sm80/quantize/lone_keys.cuh"
#include "cuda/sm80/quantize/operands.h"
#include "cuda/tuned/lone_row.cuh"
#include "numerics/octaves.h"

namespace sagebwd::cuda::sm80 {
namespace {

static_assert(numerics::kMostSampled == kBlock);

template <typename T, int D>
struct Shared {
  typename TokenBlock<T, D>::Shared block;
  double sums[kRowThreads / 32][D];
  int counts[kRowThreads / 32];
  float row[D];
};

/// Codes of the thread's keys, and their scales in the lanes that own them; from what the forward
/// saved, or anew.
template <typename T, int D>
__device__ void get_codes(const OperandJob& job, const tile::Sequence& s, int head,
                          const int64_t (&key)[TokenBlock<T, D>::kSteps],
                          const LaneCentre<D> (&centre)[TokenBlock<T, D>::kSteps],
                          TokenBlock<T, D>& b, typename TokenBlock<T, D>::Words& codes) {
  using Block = TokenBlock<T, D>;
  if (job.saved.q8 != nullptr) {
    const int64_t first = head * job.saved.keys + s.batch * job.seq.nk + s.k_begin;
    b.scale = b.own_is_real() ? job.saved.k_scale[first + (b.own() == 0 ? key[0] : key[1])] : 0.0f;
#pragma unroll
    for (int part = 0; part < Block::kParts; ++part)
#pragma unroll
      for (int step = 0; step < Block::kSteps; ++step) {
        const int channel = static_cast<int>(b.channel(part));
        codes[part][step] = make_uint2(0, 0);
        if (step < b.left && channel < job.d)
          codes[part][step] =
              *reinterpret_cast<const uint2*>(job.saved.k8 + (first + key[step]) * job.d + channel);
      }
    return;
  }
#pragma unroll
  for (int part = 0; part < Block::kParts; ++part)
#pragma unroll
    for (int step = 0; step < Block::kSteps; ++step) {
      const int channel = static_cast<int>(b.channel(part));
      Chunk<T> chunk[1];
      load_chunks<Reading::again>(
          chunk, tile::row_of<const T>(job.k, s, head, s.k_begin + key[step]) + channel, 0,
          step < b.left && channel < job.d ? 1 : 0, job.k.vector);
      b.chunk[part][step] = chunk[0];
    }
  b.template make<false>();
  if (job.rotation > 0) {
#pragma unroll
    for (int step = 0; step < Block::kSteps; ++step) tile::flip_signs(b.made[step], b.member());
    b.template rotate<false>(job.rotation);
  }
#pragma unroll
  for (int step = 0; step < Block::kSteps; ++step) subtract(b, step, centre[step]);
  b.measure_keys();
  b.template write_codes<Values::made>({.transpose = true});
  b.take_back(codes);
}

template <typename T, int D>
__global__ void __launch_bounds__(kRowThreads)
    dq_mean_kernel(const __grid_constant__ OperandJob job) {
  using Block = TokenBlock<T, D>;
  constexpr int kSteps = Block::kSteps, kParts = Block::kParts;
  __shared__ Shared<T, D> shared;
  arch::wait_for_earlier_kernels();
  arch::let_next_kernel_start();
  const int head = static_cast<int>(blockIdx.y), thread = static_cast<int>(threadIdx.x);
  const tile::Sequence s = tile::sequence_at<kBlock>(job.seq, static_cast<int>(blockIdx.x));
  const numerics::Sample sample = numerics::spread_sample(s.nk);
  Block b(shared.block, sample.count, 0);
  const auto key_of = [&](int step) {
    return step < b.left ? sample.key(b.first_token() + step) : 0;
  };
  const auto centre_of = [&](int64_t key) {
    const int octave = numerics::octave_of_block(key / kBlock);
    return LaneCentre<D>(job.centres,
                         job.centres.row(head, s.k_pad / kBlock, numerics::first_block_of(octave)),
                         b.channel(0), job.d);
  };
  double total[kParts][8] = {};
  int count = 0;
  if (s.nk > 0) {
    static_assert(kSteps == 2);
    const int64_t key[kSteps] = {key_of(0), key_of(1)};
    const LaneCentre<D> centre[kSteps] = {centre_of(key[0]), centre_of(key[1])};
    typename Block::Words codes;
    get_codes(job, s, head, key, centre, b, codes);
    float scale[kSteps];
#pragma unroll
    for (int step = 0; step < kSteps; ++step)
      scale[step] = __shfl_sync(0xffffffffu, b.scale, step, Block::kLanes);
#pragma unroll
    for (int step = 0; step < kSteps; ++step) {
      if (step >= b.left || scale[step] != scale[step]) continue;
      ++count;
      decode(b, step, codes, scale[step], centre[step]);
#pragma unroll
      for (int part = 0; part < kParts; ++part)
#pragma unroll
        for (int e = 0; e < 8; ++e) total[part][e] += static_cast<double>(b.made[step][part][e]);
    }
  }
  __syncwarp();
#pragma unroll
  for (int lanes = Block::kLanes; lanes < 32; lanes *= 2) {
    count += __shfl_xor_sync(0xffffffffu, count, lanes);
#pragma unroll
    for (int part = 0; part < kParts; ++part)
#pragma unroll
      for (int e = 0; e < 8; ++e)
        total[part][e] += __shfl_xor_sync(0xffffffffu, total[part][e], lanes);
  }
  if (thread % 32 < Block::kLanes)
#pragma unroll
    for (int part = 0; part < kParts; ++part)
#pragma unroll
      for (int e = 0; e < 8; ++e)
        shared.sums[thread / 32][b.channel(part) + static_cast<uint32_t>(e)] = total[part][e];
  if (thread % 32 == 0) shared.counts[thread / 32] = count;
  __syncthreads();
  float mean = 0.0f;
  if (thread < D) {
    double sum = 0;
    int keys = 0;
    for (int warp = 0; warp < kRowThreads / 32; ++warp)
      sum += shared.sums[warp][thread], keys += shared.counts[warp];
    if (keys > 0) mean = static_cast<float>(sum / static_cast<double>(keys));
  }
  const int64_t at = (static_cast<int64_t>(s.index) * job.hk + head) * D + thread;
  if (thread < D) job.dq_keys.turned[at] = mean;
  if (job.rotation > 0)
    mean = tuned::flipped(
        tuned::hadamard_row(shared.row, mean, thread, job.rotation, thread < job.d), thread);
  if (thread < D) job.dq_keys.mean[at] = mean;
}

}  // namespace

void launch_dq_means(const OperandJob& job, Dtype dtype, cudaStream_t stream) {
  const dim3 grid(static_cast<unsigned>(job.seq.count), static_cast<unsigned>(job.hk));
  with_instance(dtype, job.padded_d, [&]<typename T, int D>() {
    launch(dq_mean_kernel<T, D>, grid, kRowThreads, 0, job, stream);
  });
}

}  // namespace sagebwd::cuda::sm80
