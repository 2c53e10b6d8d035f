// SPDX-License-Identifier: Apache-2.0
// The mean of a span of K (tuned/runs.cuh) in `paper`, by 256 threads.
#pragma once

#include "cuda/sm80/quantize/operands.h"
#include "cuda/sm80/quantize/stage.cuh"
#include "cuda/tile/sequence.cuh"
#include "cuda/tuned/long_sum.cuh"
#include "cuda/tuned/runs.cuh"
#include "numerics/quantize.h"
#include "numerics/rotate.h"

namespace sagebwd::cuda::sm80 {

using tuned::LongSum, tuned::Runs;

/// Waits for a mean, eight channels of every 32. This ends: the pieces of work that make the mean
/// were handed out earlier (items.cuh).
template <int kParts>
__device__ __forceinline__ void wait_for_mean(float (&mean)[kParts][8], const float* from) {
  while (true) {
    uint4 word[kParts][2];
#pragma unroll
    for (int part = 0; part < kParts; ++part)
#pragma unroll
      for (int w = 0; w < 2; ++w)
        word[part][w] = __ldcv(reinterpret_cast<const uint4*>(from + part * 32) + w);
    uint32_t least = 0xffffffffu;  // of the words: 0 until all are there
#pragma unroll
    for (int part = 0; part < kParts; ++part)
#pragma unroll
      for (int w = 0; w < 2; ++w) {
        const uint32_t bits[4] = {word[part][w].x, word[part][w].y, word[part][w].z,
                                  word[part][w].w};
#pragma unroll
        for (int e = 0; e < 4; ++e)
          least = min(least, bits[e]), mean[part][4 * w + e] = __uint_as_float(bits[e]);
      }
    if (__all_sync(0xffffffffu, least != 0)) return;
    __nanosleep(100);
  }
}

template <typename T, int D>
struct MeanBlock {
  struct Shape {                          // a thread has one chunk of each of its tokens
    static constexpr int kLanes = D / 8;  // of a slot
    static constexpr int kSlots = kRowThreads / kLanes;  // of a thread block
  };
  static constexpr int kSteps = kBlock / Shape::kSlots, kWays = kRowThreads / D;

  static constexpr int kWarps = kRowThreads / 32;
  static_assert(kWays <= kWarps);

  struct Shared {
    double sums[kWarps][D];
    int counts[Shape::kSlots];
    bool last;
  };

  using StageOf = Stage<D>;
  static_assert(kSteps == StageOf::kChunks);

  const OperandJob& job;
  int head;
  Shared& shared;
  StageOf& stage;
  const MeanJob& mean = job.k_mean;
  const Strided& x = job.k;
  int slot = static_cast<int>(threadIdx.x) / Shape::kLanes;
  int channel = static_cast<int>(threadIdx.x) % Shape::kLanes * 8;

  /// Asks for a block of keys. `left`: how many its sequence has from there on.
  __device__ static void start(StageOf& stage, const Source& from, int left, int d) {
    const int slot = static_cast<int>(threadIdx.x) / Shape::kLanes * kSteps,
              channel = static_cast<int>(threadIdx.x) % Shape::kLanes * 8;
    stage.template start<Reading::again, kSteps>(from.at + slot * from.stride + channel * sizeof(T),
                                                 from.stride, left - slot, d - channel,
                                                 from.vector);
  }

  /// All runs of a span, `block` to `end`, of which the first block was asked for: `from`, with
  /// `left` keys to the end of its sequence. Calls ask(more, from, left) as soon as the stage is
  /// free: with the next block, or with more = false.
  template <typename Ask>
  __device__ void run(int block, int end, Source from, int left, Ask ask) {
    bool more = left > 0;  // or after the last document
    LongSum sum[8];
    int first = block, count = 0;
    while (true) {
      const bool real = more;
      Chunk<T> chunk[kSteps];
      arch::cp_async_wait<0>();
#pragma unroll
      for (int step = 0; step < kSteps; ++step) chunk[step].bits = stage.chunk[step][threadIdx.x];
      count += max(min(left - slot * kSteps, kSteps), 0);
      const bool ends = left <= kBlock;
      more = real && block + 1 < end;
      left -= kBlock;
      if (ends && more) {  // the next block is that of another sequence
        const tile::Sequence s = tile::sequence_of_block<kBlock>(job.seq, block + 1, false);
        const int token = static_cast<int>(static_cast<int64_t>(block + 1) * kBlock - s.k_pad);
        left = s.nk - token, more = left > 0;
        from.at = tuned::source_of(x, s, head, s.k_begin + token).at;
      } else {
        from.at += kBlock * from.stride;
      }
      ask(more, from, left);
      if (!real) return;
      add(sum, chunk);
      if (ends || !more) {
        double total[8];
        bool bad = false;
#pragma unroll
        for (int e = 0; e < 8; ++e)
          total[e] = sum[e].value(), sum[e] = {}, bad |= !(fabs(total[e]) <= tuned::kLargestSum);
        const tile::Sequence s = tile::sequence_of_block<kBlock>(job.seq, block, false);
        if (__syncthreads_or(bad)) add_carefully(s, first, block, total, count);
        write_part(s, first, total, count);
        first = block + 1, count = 0;
      }
      if (!more) return;
      ++block;
    }
  }

  /// Adds a thread's tokens of a block.
  __device__ static void add(LongSum (&sum)[8], const Chunk<T> (&chunk)[kSteps]) {
#pragma unroll
    for (int step = 0; step < kSteps; ++step) {
      float v[8];
      chunk[step].unpack(v);
#pragma unroll
      for (int e = 0; e < 8; ++e) sum[e].add(v[e]);
    }
  }

  /// The same sum without tokens that hold NaN or Inf. The others may be of any size.
  __device__ void add_carefully(const tile::Sequence& s, int first, int last, double (&total)[8],
                                int& count) const {
#pragma unroll
    for (int e = 0; e < 8; ++e) total[e] = 0.0;
    count = 0;
    const int64_t begin = static_cast<int64_t>(first) * kBlock - s.k_pad,
                  end = min(static_cast<int64_t>(last + 1) * kBlock - s.k_pad,
                            static_cast<int64_t>(s.nk));
    // All lanes of a warp go round equally often, because slot_any needs them all.
#pragma unroll 1
    for (int64_t token = begin; token < end; token += Shape::kSlots) {
      const bool real = token + slot < end;
      Chunk<T> chunk[1];
      load_chunks<Reading::again>(
          chunk, tile::row_of<const T>(x, s, head, s.k_begin + token + slot) + channel, x.token,
          real && channel < job.d ? 1 : 0, x.vector);
      float v[8];
      chunk[0].unpack(v);
      bool bad = !real;
#pragma unroll
      for (int e = 0; e < 8; ++e) bad |= !numerics::is_finite(v[e]);
      if (slot_any<Shape::kLanes>(bad)) continue;
      ++count;
#pragma unroll
      for (int e = 0; e < 8; ++e) total[e] += static_cast<double>(v[e]);
    }
  }

  __device__ void write_part(const tile::Sequence& s, int first, const double (&total)[8],
                             int count) {
    const int thread = static_cast<int>(threadIdx.x);
#pragma unroll
    for (int e = 0; e < 8; ++e) {
      double sum = total[e];  // of the warp's slots
#pragma unroll
      for (int lanes = Shape::kLanes; lanes < 32; lanes *= 2)
        sum += __shfl_xor_sync(0xffffffffu, sum, lanes);
      if (thread % 32 < Shape::kLanes) shared.sums[thread / 32][channel + e] = sum;
    }
    if (channel == 0) shared.counts[slot] = count;
    __syncthreads();
    const int64_t part = static_cast<int64_t>(head) * job.k_blocks + first;
    if (thread < D) {
      double sum = 0;
      for (int r = 0; r < kWarps; ++r) sum += shared.sums[r][thread];
      mean.part[part * D + thread] = sum;
    }
    if (thread == 0) {
      int sum = 0;
      for (int r = 0; r < Shape::kSlots; ++r) sum += shared.counts[r];
      mean.tokens[part] = sum;
    }
    __threadfence();
    __syncthreads();
    const Runs runs(s, job.seq.documents != nullptr);
    uint32_t* arrived = mean.arrived + static_cast<int64_t>(s.index) * job.hk + head;
    if (thread == 0) shared.last = atomicAdd(arrived, 1u) + 1 == static_cast<uint32_t>(runs.count);
    __syncthreads();
    if (!shared.last) return;
    __threadfence();
    finish(s, runs);
  }

  __device__ void finish(const tile::Sequence& s, const Runs& runs) {
    const int c = static_cast<int>(threadIdx.x) % D, way = static_cast<int>(threadIdx.x) / D;
    const int64_t base = static_cast<int64_t>(head) * job.k_blocks;
    double sum = 0;
    int count = 0;
#pragma unroll 4
    for (int run = way; run < runs.count; run += kWays) {
      sum += __ldcg(mean.part + (base + runs.block(run)) * D + c);
      count += __ldcg(mean.tokens + base + runs.block(run));
    }
    shared.sums[way][c] = sum;
    if (c == 0) shared.counts[way] = count;
    __syncthreads();
    for (int w = 1; way == 0 && w < kWays; ++w) sum += shared.sums[w][c], count += shared.counts[w];
    const float value = count > 0 ? static_cast<float>(sum / static_cast<double>(count)) : 0.0f;
    const int64_t row = static_cast<int64_t>(s.index) * job.hk + head;
    if (way != 0) return;
    mean.mean[row * D + c] = value == 0.0f ? -0.0f : value;
    const float turned = job.rotation > 0 && numerics::rotation_flips(c) ? -value : value;
    mean.turned[row * D + c] = turned == 0.0f ? -0.0f : turned;
  }
};

}  // namespace sagebwd::cuda::sm80
