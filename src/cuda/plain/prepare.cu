// SPDX-License-Identifier: Apache-2.0
// A warp handles a token and a thread block a block of tokens. What a run of tokens shares (a mean,
// a scale) each of its blocks finds by itself, because the run is in the cache.
//
// Tokens that hold NaN or Inf have codes 0 and scale NaN. They do not change the scale of their
// neighbours.
#include "cuda/host/launch.h"
#include "cuda/plain/centres.cuh"
#include "cuda/plain/prepare.h"
#include "cuda/plain/rotate.cuh"
#include "cuda/plain/token_block.cuh"
#include "numerics/octaves.h"
#include "numerics/quantize.h"

namespace sagebwd::cuda::plain {
namespace {

constexpr int kMaxRun = 256;
static_assert(kMaxDim <= kTokenThreads, "loops over channels give each thread one");

// ---- the mean key

__global__ void __launch_bounds__(kTokenThreads) mean_part_kernel(MeanJob job) {
  __shared__ bool poisoned[kBlock];
  const TokenBlock b(job.batch, false);
  const int64_t row0 = tile::offset_of(job.k, b.s, b.head, b.s.k_begin + b.first);
  for (int r = warp(); r < b.rows; r += kTokenWarps) {
    const bool bad = is_poisoned(job.batch.dtype, job.k, row0 + r * job.k.token, job.d);
    if (lane() == 0) poisoned[r] = bad;
  }
  __syncthreads();
  const int c = static_cast<int>(threadIdx.x);
  double sum = 0;
  int counted = 0;
  for (int r = 0; r < b.rows; ++r) {
    if (poisoned[r]) continue;
    ++counted;
    if (c < job.d)
      sum += static_cast<double>(read(job.batch.dtype, job.k, row0 + r * job.k.token + c));
  }
  if (c < job.d) job.part[b.at * job.d + c] = sum;
  if (c == 0) job.counted[b.at] = counted;
}

__global__ void __launch_bounds__(kTokenThreads) mean_kernel(MeanJob job) {
  const int head = static_cast<int>(blockIdx.x) % job.heads;
  const Sequence s = sequence_at(job.batch.seq, static_cast<int>(blockIdx.x) / job.heads);
  const int c = static_cast<int>(threadIdx.x);
  if (c >= job.d) return;
  const int64_t first = head * job.batch.k_blocks + s.k_block;
  double sum = 0;
  int64_t counted = 0;
#pragma unroll 8
  for (int64_t b = first; b < first + blocks_of(s.nk); ++b) {
    sum += job.part[b * job.d + c];
    counted += job.counted[b];
  }
  job.mean[static_cast<int64_t>(blockIdx.x) * job.d + c] =
      counted > 0 ? static_cast<float>(sum / static_cast<double>(counted)) : 0.0f;
}

// ---- codes

/// Scale of a token with largest magnitude `amax`, whose run has `run_amax`.
__device__ float scale_of(ScaleOf of, float amax, float run_amax) {
  switch (of) {
    case ScaleOf::run:
      return numerics::scale_of(run_amax);
    case ScaleOf::key:
      return numerics::key_scale_of(amax);
    case ScaleOf::value:
      return numerics::lone_value_scale(amax);
    case ScaleOf::token:
      break;
  }
  return numerics::scale_of(amax);
}

__global__ void __launch_bounds__(kTokenThreads) token_kernel(TokenJob job) {
  __shared__ float mean[kMaxDim], run_mean[kMaxDim], centre[kMaxDim];
  __shared__ float amax[kMaxRun];
  __shared__ bool poisoned[kMaxRun];
  __shared__ float row_of_warp[kTokenWarps][kMaxDim];
  const TokenBlock b(job.batch, job.queries);
  const int c = static_cast<int>(threadIdx.x), d = job.d;
  // The run has tokens first … first + rows - 1, and the block's own start at row `own`.
  const int first = b.first / job.run * job.run;
  const int rows = min(job.run, b.count - first);
  const int own = b.first - first;
  const int64_t row0 =
      tile::offset_of(job.x, b.s, b.head, (job.queries ? b.s.q_begin : b.s.k_begin) + first);
  const auto raw = [&](int r, int channel) {
    return read(job.batch.dtype, job.x, row0 + r * job.x.token + channel);
  };

  if (c < d) {
    mean[c] = job.mean == nullptr
                  ? 0.0f
                  : job.mean[(static_cast<int64_t>(b.s.index) * job.heads + b.head) * d + c];
    run_mean[c] = 0.0f;
    centre[c] = job.centres.codes == nullptr
                    ? 0.0f
                    : centre_value(job.centres, d,
                                   centre_row(job.centres, b.s, b.head, octave_of_key(first)), c);
  }
  if (job.run_mean != nullptr) {
    for (int r = warp(); r < rows; r += kTokenWarps) {
      const bool bad = is_poisoned(job.batch.dtype, job.x, row0 + r * job.x.token, d);
      if (lane() == 0) poisoned[r] = bad;
    }
    __syncthreads();
    if (c < d) {
      double sum = 0;
      int counted = 0;
      for (int r = 0; r < rows; ++r)
        if (!poisoned[r]) sum += static_cast<double>(raw(r, c)), ++counted;
      if (counted > 0) run_mean[c] = static_cast<float>(sum / counted);
      job.run_mean[b.at * d + c] = run_mean[c];
    }
  }
  __syncthreads();
  // A token as it is quantised. Each lane reads the channels lane, lane + 32, … only.
  float* const row = row_of_warp[warp()];
  const auto load = [&](int r) {
    for (int ch = lane(); ch < d; ch += 32) {
      const float x = job.mean == nullptr ? raw(r, ch) : raw(r, ch) - mean[ch];
      row[ch] = job.run_mean == nullptr ? x : x - run_mean[ch];
    }
    if (job.rotate) rotate(row, d);
    for (int ch = lane(); ch < d && job.centres.codes != nullptr; ch += 32) row[ch] -= centre[ch];
  };
  if (job.turned_mean != nullptr && warp() == 0) {
    for (int ch = lane(); ch < d; ch += 32) row[ch] = run_mean[ch];
    rotate(row, d);
    for (int ch = lane(); ch < d; ch += 32) job.turned_mean[b.at * d + ch] = row[ch];
  }

  for (int r = warp(); r < rows; r += kTokenWarps) {
    load(r);
    const float top = row_amax(row, d);
    if (lane() == 0) amax[r] = isnan(top) ? 0.0f : top, poisoned[r] = isnan(top);
  }
  __syncthreads();

  float run_amax = 0.0f;
  bool block_poisoned = false;
  for (int r = 0; r < rows; ++r) {
    run_amax = fmaxf(run_amax, amax[r]);
    block_poisoned |= poisoned[r] && r >= own && r < own + kBlock;
  }
  if (c == 0) job.to.poisoned[b.at] = block_poisoned;
  for (int r = own + warp(); r < own + b.rows; r += kTokenWarps) {
    const int64_t to = b.place(job.tokens, r - own);
    const float scale = scale_of(job.scale_of, amax[r], run_amax);
    const float inverse = numerics::inverse_of(scale);
    if (lane() == 0 && job.to.scale != nullptr) job.to.scale[to] = poisoned[r] ? NAN : scale;
    load(r);
    for (int ch = lane(); ch < job.pitch; ch += 32) {
      if (job.to.codes != nullptr)
        job.to.codes[to * job.pitch + ch] =
            ch >= d || poisoned[r] ? int8_t{0}
                                   : static_cast<int8_t>(numerics::code_nearest(row[ch], inverse));
      if (job.to.values != nullptr)
        job.to.values[to * job.pitch + ch] =
            ch >= d
                ? 0.0f
                : numerics::inf_as_nan(job.mean == nullptr ? raw(r, ch) : raw(r, ch) - mean[ch]);
    }
  }
}

// ---- queries

__global__ void __launch_bounds__(kTokenThreads) row_kernel(RowJob job) {
  const TokenBlock b(job.batch, true);
  const int64_t kv = static_cast<int64_t>(b.s.index) * (job.h / job.group) + b.head / job.group;
  const float* k_mean = job.k_mean == nullptr ? nullptr : job.k_mean + kv * job.d;
  for (int r = warp(); r < b.rows; r += kTokenWarps) {
    const int64_t token = b.s.q_begin + b.first + r;
    const int64_t to = b.place(job.tq, r);
    if (job.q.data != nullptr) {
      const int64_t q = tile::offset_of(job.q, b.s, b.head, token);
      double dot = 0;
      for (int c = lane(); c < job.d && k_mean != nullptr; c += 32)
        dot += static_cast<double>(read(job.batch.dtype, job.q, q + c)) *
               static_cast<double>(k_mean[c]);
      dot = warp_sum(dot);
      if (lane() == 0)
        job.mean_logit[to] = static_cast<float>(static_cast<double>(job.scale) * dot);
    }
    if (job.lse2 == nullptr) continue;

    const int64_t o = tile::offset_of(job.o, b.s, b.head, token),
                  dout = tile::offset_of(job.dout, b.s, b.head, token);
    double delta = 0;
    for (int c = lane(); c < job.value_d; c += 32)
      delta += static_cast<double>(read(job.batch.dtype, job.dout, dout + c)) *
               static_cast<double>(read(job.batch.dtype, job.o, o + c));
    delta = warp_sum(delta);
    const float lse = *tile::stat_of(job.lse, b.s, b.head, token);
    const bool active = lse != -INFINITY;
    if (job.dlse.data != nullptr)
      delta -= static_cast<double>(*tile::stat_of(job.dlse, b.s, b.head, token));
    const bool lacks = !job.capped && job.mean_logit != nullptr;
    const double mean_logit = lacks ? static_cast<double>(job.mean_logit[to]) : 0.0,
                 smooth_lse = static_cast<double>(lse) - mean_logit;
    if (lane() == 0)
      job.lse2[to] = active ? static_cast<float>(smooth_lse * (1.0 / numerics::kLn2)) : -INFINITY;
    const bool centred = job.v_centres.codes != nullptr;
    for (int octave = 0; octave < (centred ? numerics::octaves_of(b.s.nk) : 1); ++octave) {
      double dot = 0;  // of dO and the centre
      if (centred) {
        const int64_t row = centre_row(job.v_centres, b.s, b.head / job.group, octave);
        for (int c = lane(); c < job.value_d; c += 32)
          dot += static_cast<double>(read(job.batch.dtype, job.dout, dout + c)) *
                 static_cast<double>(centre_value(job.v_centres, job.value_d, row, c));
        dot = warp_sum(dot);
      }
      if (lane() == 0)
        job.delta[octave * (job.h * job.tq) + to] = active ? static_cast<float>(delta - dot) : 0.0f;
    }
  }
}

__global__ void max_kernel(MaxJob job) {
  const int64_t i = static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x;
  if (i >= static_cast<int64_t>(job.batch.seq.count) * job.h) return;
  const Sequence s = sequence_at(job.batch.seq, static_cast<int>(i / job.h));
  const float* from = job.block_max + i % job.h * job.batch.q_blocks + s.q_block;
  float largest = -INFINITY;
  for (int b = 0; b < blocks_of(s.nq); ++b)
    if (!(from[b] <= largest)) {  // also takes a NaN, and then nothing after it
      largest = from[b];
      if (isnan(largest)) break;
    }
  job.max_logit[i] = largest;
}

}  // namespace

void launch_mean(const MeanJob& job, cudaStream_t stream) {
  launch(mean_part_kernel, grid_of(job.batch.k_blocks, job.heads), kTokenThreads, 0, job, stream);
  launch(mean_kernel, grid_of(job.batch.seq.count, job.heads), kTokenThreads, 0, job, stream);
}

void launch_tokens(const TokenJob& job, cudaStream_t stream) {
  launch(token_kernel, grid_of(job.batch, job.queries, job.heads), kTokenThreads, 0, job, stream);
}

void launch_rows(const RowJob& job, cudaStream_t stream) {
  launch(row_kernel, grid_of(job.batch.q_blocks, job.h), kTokenThreads, 0, job, stream);
}

void launch_max(const MaxJob& job, cudaStream_t stream) {
  const int64_t items = static_cast<int64_t>(job.batch.seq.count) * job.h;
  launch(max_kernel, dim3(static_cast<unsigned>((items + kTokenThreads - 1) / kTokenThreads)),
         kTokenThreads, 0, job, stream);
}

}  // namespace sagebwd::cuda::plain
