// SPDX-License-Identifier: Apache-2.0
// The first kernel of a backward in recipe `tokenwise`, beside that of `vectorwise` (tops.cuh): the
// largest scale of V of each sequence, the mean of a sample of its keys, which the operand of dQ
// lacks, and a bound of that operand's scales.
//
// Keys are made again from their codes. They are rotated, and so is the mean.
#pragma once

#include "cuda/sm90/bwd/tops.cuh"
#include "numerics/octaves.h"
#include "numerics/rotate.h"

namespace sagebwd::cuda::sm90 {

/// One head of one sequence, of a thread block.
struct KeySummary {
  static constexpr int kMostD = 128, kGroups = kTopThreads / 64;
  struct Shared {
    double sum[kTopThreads];
    int tokens[kGroups];
    float mean[kMostD], x[kMostD];
    float reach[kCentreRows];  // the largest magnitude of a centre without the mean
  };

  const BackwardJob& job;
  Shared& shared;
  int place, head, thread;
  tile::Sequence s;
  int64_t first_key, first_block;  // in the saved codes

  __device__ KeySummary(const BackwardJob& j, Shared& memory, int at)
      : job(j),
        shared(memory),
        place(at),
        head(at % j.hk),
        thread(static_cast<int>(threadIdx.x)),
        s(tile::sequence_at<kBlock>(j.seq, at / j.hk)),
        first_key(head * j.saved.keys + s.batch * j.seq.nk + s.k_begin),
        first_block(head * j.saved.key_blocks + s.k_pad / kBlock) {}

  __device__ float centre(int octave, int channel) const {
    const int64_t row = first_block + numerics::first_block_of(octave);
    return __fmul_rn(job.centre_scale[row], job.centre8[row * job.d + channel]);
  }

  /// The mean of the sample. Each group of threads adds some of the keys up, a thread a channel.
  __device__ void find_mean() const {
    const int channel = thread % job.d, group = thread / job.d, groups = kTopThreads / job.d;
    const numerics::Sample sample = numerics::spread_sample(s.nk);
    double sum = 0.0;
    int tokens = 0;
#pragma unroll 4
    for (int n = group; n < sample.count; n += groups) {
      const int64_t key = sample.key(n);
      const float scale = job.saved.k_scale[first_key + key];
      if (!(scale == scale)) continue;
      const float code = job.saved.k8[(first_key + key) * job.d + channel];
      sum += static_cast<double>(
          fmaf(scale, code, centre(numerics::octave_of_block(key / kBlock), channel)));
      ++tokens;
    }
    shared.sum[thread] = sum;
    if (channel == 0) shared.tokens[group] = tokens;
    __syncthreads();
    if (thread < job.d) {
      int all = 0;
      sum = 0.0;
      for (int i = 0; i < groups; ++i)
        sum += shared.sum[i * job.d + thread], all += shared.tokens[i];
      const float mean = all > 0 ? static_cast<float>(sum / all) : 0.0f;
      shared.mean[thread] = shared.x[thread] = mean;
      job.dq_mean[static_cast<int64_t>(place) * job.d + thread] = mean;
    }
    __syncthreads();
  }

  /// The mean with the rotation turned back.
  __device__ void turn_mean_back() const {
    const bool mine = thread < job.d;
    float x = mine ? shared.x[thread] : 0.0f;
    for (int distance = 1; distance < job.rotation; distance *= 2) {
      const float other = mine ? shared.x[thread ^ distance] : 0.0f;
      x = (thread & distance) != 0 ? other - x : x + other;
      __syncthreads();
      if (mine) shared.x[thread] = x;
      __syncthreads();
    }
    if (!mine) return;
    if (job.rotation > 0) {
      const float unit = numerics::rotation_unit(job.rotation);
      x *= numerics::rotation_flips(thread) ? -unit : unit;
    }
    job.dq_mean_back[static_cast<int64_t>(place) * job.d + thread] = x;
  }

  __device__ void find_reaches() const {
    for (int octave = thread / 32; octave < numerics::octaves_of(s.nk);
         octave += kTopThreads / 32) {
      float most = 0.0f;
      for (int channel = thread % 32; channel < job.d; channel += 32)
        most = fmaxf(most, fabsf(centre(octave, channel) - shared.mean[channel]));
      const uint32_t bits = __reduce_max_sync(0xffffffffu, __float_as_uint(most));
      if (thread % 32 == 0) shared.reach[octave] = __uint_as_float(bits);
    }
    __syncthreads();
  }

  __device__ void find_tops() const {
    const float *v_scale = job.saved.v_scale + first_key, *k_scale = job.saved.k_scale + first_key;
    uint32_t v_most = 0;
    float k_most = 0.0f;
#pragma unroll 4
    for (int i = thread; i < s.nk; i += kTopThreads) {
      v_most = max(v_most, bits_of_finite(v_scale[i]));
      // No number of the key made again, without the mean, is larger than 127 of these.
      const float reach = shared.reach[numerics::octave_of_block(i / kBlock)];
      k_most = fmaxf(k_most, fmaf(reach, 1.0f / numerics::kLevels, k_scale[i]));  // not NaN
    }
    write_tops(job, place, v_most, bits_of_finite(k_most));
  }
};

__global__ void __launch_bounds__(kTopThreads)
    token_tops_kernel(const __grid_constant__ BackwardJob job) {
  arch::let_next_kernel_start();
  clear_pieces(job.zeros);
  const int place = static_cast<int>(blockIdx.x);
  if (place >= job.seq.count * job.hk) return;
  __shared__ KeySummary::Shared shared;
  const KeySummary keys(job, shared, place);
  keys.find_mean();
  keys.turn_mean_back();
  keys.find_reaches();
  keys.find_tops();
}

}  // namespace sagebwd::cuda::sm90
