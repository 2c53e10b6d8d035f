// SPDX-License-Identifier: Apache-2.0
#include "cuda/host/launch.h"
#include "cuda/plain/centres.cuh"
#include "cuda/plain/centres.h"
#include "cuda/plain/rotate.cuh"
#include "cuda/plain/token_block.cuh"

namespace sagebwd::cuda::plain {
namespace {

// ---- the centres

/// A thread block has a block of kKeysPerScale keys, and something to do if an octave starts there.
__global__ void __launch_bounds__(kTokenThreads) centre_kernel(CentreJob job) {
  __shared__ bool poisoned[numerics::kMostSampled];
  __shared__ float row[kMaxDim];
  __shared__ double excess[kMaxDim];  // energy of the mean (kLeastCentreShare)
  const int head = static_cast<int>(blockIdx.x / job.blocks);
  const int64_t block = blockIdx.x % job.blocks;
  const tile::Sequence s =
      tile::sequence_of_block<kKeysPerScale>(job.to.blocks, static_cast<int>(block), false);
  const int64_t own = block - s.k_pad / kKeysPerScale;
  const int octave = numerics::octave_of_block(own), c = static_cast<int>(threadIdx.x);
  if (numerics::first_block_of(octave) != own) return;

  if (c < job.d) row[c] = 0.0f, excess[c] = 0.0;
  if (job.smooth && !(job.of_values && octave < numerics::kFirstValueCentre)) {
    const numerics::Sample sample = numerics::centre_sample(octave);
    const auto sampled = [&](int n) {
      return tile::offset_of(job.x, s, head, s.k_begin + sample.key(n));
    };
    for (int n = warp(); n < sample.count; n += kTokenWarps) {
      const bool bad = is_poisoned(job.batch.dtype, job.x, sampled(n), job.d);
      if (lane() == 0) poisoned[n] = bad;
    }
    __syncthreads();
    if (c < job.d) {
      double sum = 0, square = 0;
      int counted = 0;
      for (int n = 0; n < sample.count; ++n) {
        if (poisoned[n]) continue;
        ++counted;
        const auto x = static_cast<double>(read(job.batch.dtype, job.x, sampled(n) + c));
        sum += x, square += x * x;
      }
      if (counted > 0) row[c] = static_cast<float>(sum / counted);
      const auto mean = static_cast<double>(row[c]);
      excess[c] = counted * (mean * mean) - numerics::kLeastCentreShare * square;
    }
  }
  __syncthreads();
  if (warp() != 0) return;
  if (job.of_values) {
    double all = 0;
    for (int ch = 0; ch < job.d; ++ch) all += excess[ch];
    for (int ch = lane(); ch < job.d && !(all >= 0.0); ch += 32) row[ch] = 0.0f;
    __syncwarp();
  }
  if (job.smooth && job.rotate) rotate(row, job.d);
  const float scale = numerics::scale_of(row_amax(row, job.d));
  const float inverse = numerics::inverse_of(scale);
  const int64_t to = centre_row(job.to, s, head, octave);
  if (lane() == 0) job.to.scale[to] = scale;
  for (int ch = lane(); ch < job.d; ch += 32)
    job.to.codes[to * job.d + ch] =
        static_cast<int8_t>(isnan(scale) ? 0 : numerics::code_nearest(row[ch], inverse));
}

// ---- their logits

__global__ void __launch_bounds__(kTokenThreads) centre_logit_kernel(CentreLogitJob job) {
  const TokenBlock b(job.batch, true);
  const int octaves = numerics::octaves_of(b.s.nk);
  for (int r = warp(); r < b.rows; r += kTokenWarps) {
    const int64_t at = b.place(job.tq, r);
    const float logit_factor = job.q.scale[at] * (job.scale * numerics::kLog2e);
    for (int octave = 0; octave < octaves; ++octave) {
      const int64_t row = centre_row(job.centres, b.s, b.head / job.group, octave);
      int dot = 0;
      for (int c = lane(); c < job.d; c += 32)
        dot += static_cast<int>(job.q.codes[at * job.pitch + c]) *
               static_cast<int>(job.centres.codes[row * job.d + c]);
      dot = warp_sum(dot);
      if (lane() == 0)
        job.to[octave * (job.h * job.tq) + at] =
            static_cast<float>(dot) * job.centres.scale[row] * logit_factor;
    }
  }
}

// ---- the keys of dQ

/// A key as its codes have it.
struct CodedKey {
  __device__ CodedKey(const DqKeysJob& job, const Sequence& s, int head, int key)
      : at(head * job.tokens + s.k_first + key),
        scale(job.k.scale[at]),
        codes(job.k.codes + at * job.pitch) {}
  __device__ float operator()(int channel, float centre) const {
    return scale * static_cast<float>(codes[channel]) + centre;
  }
  int64_t at;
  float scale;  // NaN: the key holds NaN or Inf
  const int8_t* codes;
};

__global__ void __launch_bounds__(kTokenThreads) dq_mean_kernel(DqKeysJob job) {
  __shared__ float row[kMaxDim];
  const int head = static_cast<int>(blockIdx.x) % job.heads, c = static_cast<int>(threadIdx.x);
  const Sequence s = sequence_at(job.batch.seq, static_cast<int>(blockIdx.x) / job.heads);
  const numerics::Sample sample = numerics::spread_sample(s.nk);
  if (c < job.d) {
    double sum = 0;
    int counted = 0;
    for (int n = 0; n < sample.count; ++n) {
      const int j = static_cast<int>(sample.key(n));
      const CodedKey key(job, s, head, j);
      if (isnan(key.scale)) continue;
      ++counted;
      const int64_t centre = centre_row(job.centres, s, head, octave_of_key(j));
      sum += static_cast<double>(key(c, centre_value(job.centres, job.d, centre, c)));
    }
    row[c] = counted > 0 ? static_cast<float>(sum / counted) : 0.0f;
    job.turned_mean[static_cast<int64_t>(blockIdx.x) * job.d + c] = row[c];
  }
  __syncthreads();
  if (warp() != 0) return;
  if (job.rotated) rotate_back(row, job.d);
  for (int ch = lane(); ch < job.d; ch += 32)
    job.mean[static_cast<int64_t>(blockIdx.x) * job.d + ch] = row[ch];
}

constexpr int kMostTile = kKeysPerScale;

/// Each block of a tile finds the tile's scale by itself.
__global__ void __launch_bounds__(kTokenThreads) dq_key_kernel(DqKeysJob job) {
  __shared__ float mean[kMaxDim], centre[kMaxDim], amax[kMostTile];
  const TokenBlock b(job.batch, false);
  const int first = b.first / job.tile * job.tile, c = static_cast<int>(threadIdx.x);
  const int rows = min(job.tile, b.count - first), own = b.first - first;
  if (c < job.d) {
    const int64_t row = centre_row(job.centres, b.s, b.head, octave_of_key(first));
    centre[c] = centre_value(job.centres, job.d, row, c);
    mean[c] = job.turned_mean[(static_cast<int64_t>(b.s.index) * job.heads + b.head) * job.d + c];
  }
  __syncthreads();
  const auto value = [&](const CodedKey& key, int channel) {
    return isnan(key.scale) ? 0.0f : key(channel, centre[channel]) - mean[channel];
  };
  for (int r = warp(); r < rows; r += kTokenWarps) {
    const CodedKey key(job, b.s, b.head, first + r);
    float top = 0.0f;
    for (int ch = lane(); ch < job.d; ch += 32) top = fmaxf(top, fabsf(value(key, ch)));
    top = warp_max(top);
    if (lane() == 0) amax[r] = top;
  }
  __syncthreads();
  float tile_amax = 0.0f;
  for (int r = 0; r < rows; ++r) tile_amax = fmaxf(tile_amax, amax[r]);
  const float scale = numerics::scale_of(tile_amax), inverse = numerics::inverse_of(scale);
  for (int r = own + warp(); r < own + b.rows; r += kTokenWarps) {
    const CodedKey key(job, b.s, b.head, first + r);
    if (lane() == 0) job.to.scale[key.at] = scale;
    for (int ch = lane(); ch < job.pitch; ch += 32)
      job.to.codes[key.at * job.pitch + ch] =
          static_cast<int8_t>(ch < job.d ? numerics::code_nearest(value(key, ch), inverse) : 0);
  }
}

}  // namespace

void launch_centres(const CentreJob& job, cudaStream_t stream) {
  launch(centre_kernel, grid_of(job.blocks, job.heads), kTokenThreads, 0, job, stream);
}

void launch_centre_logits(const CentreLogitJob& job, cudaStream_t stream) {
  launch(centre_logit_kernel, grid_of(job.batch, true, job.h), kTokenThreads, 0, job, stream);
}

void launch_dq_keys(const DqKeysJob& job, cudaStream_t stream) {
  launch(dq_mean_kernel, grid_of(job.batch.seq.count, job.heads), kTokenThreads, 0, job, stream);
  launch(dq_key_kernel, grid_of(job.batch, false, job.heads), kTokenThreads, 0, job, stream);
}

}  // namespace sagebwd::cuda::plain
