// SPDX-License-Identifier: Apache-2.0
// The first kernel of a backward: the largest scale of V of each sequence with its centre, the mean
// of a sample of its keys, which the operand of dQ lacks, a bound of that operand's scales, and
// zeros where the call needs them.
//
// Keys are made again from their codes. They are rotated, and so is the mean.
#pragma once

#include "cuda/arch/kernel_order.cuh"
#include "cuda/sm90/bwd/operands.h"
#include "cuda/tile/codes.cuh"
#include "cuda/tile/layout.h"
#include "cuda/tile/sequence.cuh"
#include "numerics/octaves.h"
#include "numerics/rotate.h"

namespace sagebwd::cuda::sm90 {

inline constexpr int kTopThreads = 256;
inline constexpr int64_t kMostZeroBlocks = 256;

/// Bits of finite scales; 0 for others. Their order is that of the numbers.
__device__ inline uint32_t bits_of_finite(float scale) {
  return numerics::is_finite(scale) ? __float_as_uint(scale) : 0u;
}

/// The thread's part of what is zeroed.
__device__ inline void clear_pieces(const tuned::Zeros& zeros) {
  for (const tuned::Zeros::Piece& piece : zeros.piece)
    for (int64_t i = static_cast<int64_t>(blockIdx.x) * kTopThreads + threadIdx.x; i < piece.words;
         i += static_cast<int64_t>(gridDim.x) * kTopThreads)
      piece.at[i] = 0;
}

/// Writes the largest numbers of all threads, as bits.
__device__ inline void write_tops(const BackwardJob& job, int place, uint32_t v_most,
                                  uint32_t k_most) {
  const int thread = static_cast<int>(threadIdx.x);
  __shared__ uint2 most[kTopThreads / 32];
  v_most = __reduce_max_sync(0xffffffffu, v_most), k_most = __reduce_max_sync(0xffffffffu, k_most);
  if (thread % 32 == 0) most[thread / 32] = make_uint2(v_most, k_most);
  __syncthreads();
  if (thread >= 32) return;
  const uint2 mine = thread < kTopThreads / 32 ? most[thread] : make_uint2(0, 0);
  v_most = __reduce_max_sync(0xffffffffu, mine.x), k_most = __reduce_max_sync(0xffffffffu, mine.y);
  if (thread != 0) return;
  job.v_top[place] = v_most, job.k_top[place] = k_most;
}

/// One head of one sequence, of a thread block.
struct KeySummary {
  static constexpr int kMostD = 128;
  struct Shared {
    float sum[kTopThreads / 32][kMostD];
    int tokens[kTopThreads / 32];
    float mean[kMostD], x[kMostD];
    float reach[kCentreRows];       // the largest magnitude of a centre of K without the mean
    float value_unit[kCentreRows];  // the scale of a centre of V
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

  /// The mean of the sample. A thread has 16 channels of one or two keys; neighbouring lanes share
  /// a key. Sums in FP32 suffice: what is taken out of the keys is this mean, whatever it is.
  __device__ void find_mean() const {
    const int lanes = job.d / 16, chunk = thread % lanes, slots = kTopThreads / lanes;
    const numerics::Sample sample = numerics::spread_sample(s.nk);
    float x[16] = {};
    int tokens = 0;
#pragma unroll 2
    for (int n = thread / lanes; n < sample.count; n += slots) {
      const int64_t key = sample.key(n),
                    row = first_block +
                          numerics::first_block_of(numerics::octave_of_block(key / kBlock));
      const float scale = job.saved.k_scale[first_key + key], unit = job.centre_scale[row];
      const auto part = [&](const int8_t* codes) {
        return *reinterpret_cast<const uint4*>(codes + chunk * 16);
      };
      const uint4 code = part(job.saved.k8 + (first_key + key) * job.d),
                  of_centre = part(job.centre8 + row * job.d);
      if (!(scale == scale)) continue;  // the key holds NaN or Inf
      add_four(x, code.x, of_centre.x, scale, unit),
          add_four(x + 4, code.y, of_centre.y, scale, unit);
      add_four(x + 8, code.z, of_centre.z, scale, unit),
          add_four(x + 12, code.w, of_centre.w, scale, unit);
      ++tokens;
    }
    const int lane = thread % 32, warp = thread / 32;
    for (int distance = lanes; distance < 32; distance *= 2) {
#pragma unroll
      for (float& channel : x) channel += __shfl_xor_sync(0xffffffffu, channel, distance);
      tokens += __shfl_xor_sync(0xffffffffu, tokens, distance);
    }
    if (lane < lanes)
#pragma unroll
      for (int e = 0; e < 16; ++e) shared.sum[warp][chunk * 16 + e] = x[e];
    if (lane == 0) shared.tokens[warp] = tokens;
    __syncthreads();
    if (thread < job.d) {
      int all = 0;
      float sum = 0.0f;
#pragma unroll
      for (int i = 0; i < kTopThreads / 32; ++i)
        sum += shared.sum[i][thread], all += shared.tokens[i];
      const float mean = all > 0 ? sum / static_cast<float>(all) : 0.0f;
      shared.mean[thread] = shared.x[thread] = mean;
      job.dq_mean[static_cast<int64_t>(place) * job.d + thread] = mean;
    }
    __syncthreads();
  }
  /// Adds four channels of a key that is made again.
  __device__ static void add_four(float* x, uint32_t codes, uint32_t of_centre, float scale,
                                  float unit) {
    float code[4], centre[4];
    tile::unpack_codes(code, codes), tile::unpack_codes(centre, of_centre);
#pragma unroll
    for (int e = 0; e < 4; ++e) x[e] += fmaf(scale, code[e], __fmul_rn(unit, centre[e]));
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
      if (thread % 32 != 0) continue;
      shared.reach[octave] = __uint_as_float(bits);
      shared.value_unit[octave] =
          job.v_centre_scale[first_block + numerics::first_block_of(octave)];
    }
    __syncthreads();
  }

  __device__ void find_tops() const {
    const float *v_scale = job.saved.v_scale + first_key, *k_scale = job.saved.k_scale + first_key;
    uint32_t v_most = 0;
    float k_most = 0.0f;
#pragma unroll 4
    for (int i = thread; i < s.nk; i += kTopThreads) {
      // No number of the value or the key made again, without the mean, is larger than 127 of
      // these.
      const int octave = numerics::octave_of_block(i / kBlock);
      const float reach = shared.reach[octave];
      v_most = max(v_most, bits_of_finite(v_scale[i] + shared.value_unit[octave]));
      k_most = fmaxf(k_most, fmaf(reach, 1.0f / numerics::kLevels, k_scale[i]));  // not NaN
    }
    write_tops(job, place, v_most, bits_of_finite(k_most));
  }
};

__global__ void __launch_bounds__(kTopThreads)
    tops_kernel(const __grid_constant__ BackwardJob job) {
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
