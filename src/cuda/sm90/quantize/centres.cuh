// SPDX-License-Identifier: Apache-2.0
// The centres of keys in recipe `tokenwise`: the mean of a sample of earlier keys for each octave
// (numerics/octaves.h), with the sums and the rotation of the recipe oracle, bit by bit.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include "cuda/arch/kernel_order.cuh"
#include "cuda/sm90/quantize/job.h"
#include "cuda/tile/sequence.cuh"
#include "numerics/octaves.h"
#include "numerics/quantize.h"
#include "numerics/rotate.h"

namespace sagebwd::cuda::sm90 {

inline constexpr int kCentreThreads = 128;

template <typename T, int D>
struct CentreMaker {
  static constexpr int kChunks = D / 8;  // of 16 bytes, of a key
  static_assert(D <= kCentreThreads && numerics::kMostSampled <= kCentreThreads);

  struct Shared {
    uint4 keys[numerics::kMostSampled][kChunks];
    bool poisoned[numerics::kMostSampled];  // holds NaN or Inf
    float x[D];
    uint32_t top[kCentreThreads / 32];  // bits of largest magnitudes
  };

  const CodesJob& job;
  Shared& shared;
  int thread;

  /// The keys of the sample.
  __device__ void load(const tile::Sequence& s, int head, const numerics::Sample& sample) const {
    if (thread < sample.count) shared.poisoned[thread] = false;
    __syncthreads();
#pragma unroll 4
    for (int i = thread; i < sample.count * kChunks; i += kCentreThreads) {
      const int n = i / kChunks, chunk = i % kChunks;
      const T* from = tile::row_of<const T>(job.k, s, head, s.k_begin + sample.key(n)) + chunk * 8;
      alignas(16) T x[8];
      if (job.k.vector) {
        *reinterpret_cast<uint4*>(x) = *reinterpret_cast<const uint4*>(from);
      } else {
#pragma unroll
        for (int e = 0; e < 8; ++e) x[e] = from[e];
      }
      shared.keys[n][chunk] = *reinterpret_cast<const uint4*>(x);
      bool poisoned = false;
#pragma unroll
      for (int e = 0; e < 8; ++e) poisoned |= !numerics::is_finite(static_cast<float>(x[e]));
      if (poisoned) shared.poisoned[n] = true;
    }
    __syncthreads();
  }

  /// The mean of the thread's channel.
  __device__ float mean(int count) const {
    double sum = 0.0;
    int tokens = 0;
    for (int n = 0; n < count; ++n) {
      if (shared.poisoned[n]) continue;
      sum += static_cast<double>(
          static_cast<float>(reinterpret_cast<const T*>(shared.keys[n])[thread]));
      ++tokens;
    }
    return tokens > 0 ? static_cast<float>(sum / tokens) : 0.0f;
  }

  /// The thread's channel of x·R, in the order of numerics::rotate.
  __device__ float rotated(float x) const {
    if (numerics::rotation_flips(thread)) x = -x;
    for (int distance = 1; distance < job.rotation; distance *= 2) {
      if (thread < D) shared.x[thread] = x;
      __syncthreads();
      if (thread < D) {
        const float other = shared.x[thread ^ distance];
        x = (thread & distance) != 0 ? other - x : x + other;
      }
      __syncthreads();
    }
    return x * numerics::rotation_unit(job.rotation);
  }

  /// The largest magnitude of all threads, as bits: their order is that of magnitudes, NaN on top.
  __device__ float largest(float x) const {
    const uint32_t most = __reduce_max_sync(0xffffffffu, __float_as_uint(fabsf(x)));
    if (thread % 32 == 0) shared.top[thread / 32] = most;
    __syncthreads();
    uint32_t all = 0;
#pragma unroll
    for (uint32_t top : shared.top) all = max(all, top);
    return __uint_as_float(all);
  }

  __device__ void run(int place, int octave) const {
    const int sequence = place / job.hk, head = place - sequence * job.hk;
    const tile::Sequence s = tile::sequence_at<kBlock>(job.seq, sequence);
    if (octave >= numerics::octaves_of(s.nk)) return;
    float x = 0.0f;
    if (!job.centres_are_zero) {
      const numerics::Sample sample = numerics::centre_sample(octave);
      load(s, head, sample);
      if (thread < D) x = mean(sample.count);
      if (job.rotation > 0) x = rotated(x);
    }
    const float scale = numerics::scale_of(largest(x));
    const auto code = static_cast<int8_t>(numerics::code_nearest(x, numerics::inverse_of(scale)));
    const int64_t row = static_cast<int64_t>(place) * kCentreRows + octave,
                  block = job.centres.row(head, s.k_pad / kBlock, numerics::first_block_of(octave));
    if (thread < D)
      job.centre_rows.codes[row * D + thread] = job.centres.codes[block * D + thread] = code;
    if (thread == 0) job.centre_rows.scale[row] = job.centres.scale[block] = scale;
  }
};

/// A thread block makes the centre of an octave of a head of a sequence. It reads nothing that the
/// kernel before it writes, which in turn has waited for all others; but whoever comes next waits
/// for both.
template <typename T, int D>
__global__ void __launch_bounds__(kCentreThreads)
    centres_kernel(const __grid_constant__ CodesJob job) {
  using Maker = CentreMaker<T, D>;
  __shared__ typename Maker::Shared shared;
  arch::let_next_kernel_start();
  Maker{job, shared, static_cast<int>(threadIdx.x)}.run(static_cast<int>(blockIdx.x),
                                                        static_cast<int>(blockIdx.y));
  arch::wait_for_earlier_kernels();
}

}  // namespace sagebwd::cuda::sm90
