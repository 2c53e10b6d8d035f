// SPDX-License-Identifier: Apache-2.0
// A warp handles a token and a thread block a block of tokens. What a whole tile shares (a mean, a
// scale) each of its blocks finds by itself, because the tile is in the cache.
//
// Tokens that hold NaN or Inf have codes 0 and scale NaN. They do not change the scale of their
// neighbours.
#include "cuda/host/launch.h"
#include "cuda/plain/prepare.h"
#include "cuda/plain/sequence.cuh"
#include "numerics/quantize.h"

namespace sagebwd::cuda::plain {
namespace {

constexpr int kThreads = 256;
constexpr int kWarps = kThreads / 32;
constexpr int kMaxTile = 256;
constexpr int kMaxDim = 256;
static_assert(kMaxDim <= kThreads, "loops over channels give each thread one");

__device__ int warp() { return static_cast<int>(threadIdx.x) / 32; }
__device__ int lane() { return static_cast<int>(threadIdx.x) % 32; }

__device__ double warp_sum(double x) {
  for (int m = 16; m > 0; m /= 2) x += __shfl_xor_sync(0xffffffffu, x, m);
  return x;
}
__device__ float warp_max(float x) {
  for (int m = 16; m > 0; m /= 2) x = fmaxf(x, __shfl_xor_sync(0xffffffffu, x, m));
  return x;
}
__device__ bool warp_any(bool x) { return __any_sync(0xffffffffu, x) != 0; }

dim3 grid_of(int64_t blocks, int heads) { return dim3(static_cast<unsigned>(blocks * heads)); }

/// Work of one thread block: a block of one head's tokens.
struct Place {
  __device__ Place(const Batch& batch, bool queries) {
    const int64_t blocks = queries ? batch.q_blocks : batch.k_blocks;
    head = static_cast<int>(blockIdx.x / blocks);
    block = blockIdx.x % blocks;
    at = head * blocks + block;
    s = sequence_of_block(batch.seq, block, queries);
    first = static_cast<int>(block - (queries ? s.q_block : s.k_block)) * kBlock;
    count = queries ? s.nq : s.nk;
    rows = min(kBlock, count - first);
  }
  Sequence s;
  int head, rows;     // rows: tokens the block has
  int64_t block, at;  // number of the block; place in arrays [heads, blocks]
  int first, count;   // first token inside the sequence; tokens of the sequence
};

// ---- means

/// Whether the token at `row` holds NaN or Inf; asked by a whole warp.
__device__ bool is_poisoned(Dtype dtype, const Strided& x, int64_t row, int d) {
  bool bad = false;
  for (int c = lane(); c < d; c += 32) bad |= !numerics::is_finite(read(dtype, x, row + c));
  return warp_any(bad);
}

__global__ void __launch_bounds__(kThreads) mean_part_kernel(MeanJob job) {
  __shared__ bool poisoned[kBlock];
  const Place b(job.batch, false);
  const int64_t row0 = tile::offset_of(job.x, b.s, b.head, b.s.k_begin + b.first);
  for (int r = warp(); r < b.rows; r += kWarps) {
    const bool bad = is_poisoned(job.batch.dtype, job.x, row0 + r * job.x.token, job.d);
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
      sum += static_cast<double>(read(job.batch.dtype, job.x, row0 + r * job.x.token + c));
  }
  if (c < job.d) job.part[b.at * job.d + c] = sum;
  if (c == 0) job.counted[b.at] = counted;
}

__global__ void __launch_bounds__(kThreads) mean_kernel(MeanJob job) {
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

__global__ void __launch_bounds__(kThreads) token_kernel(TokenJob job) {
  __shared__ float mean[kMaxDim], tile_mean[kMaxDim];
  __shared__ float amax[kMaxTile];
  __shared__ bool poisoned[kMaxTile];
  const Place b(job.batch, job.queries);
  const int c = static_cast<int>(threadIdx.x), d = job.d;
  // Tokens first … first + rows - 1 share a mean or a scale; the block's own start at row `own`.
  const bool shared = job.scale_by_tile || job.tile_mean != nullptr;
  const int first = shared ? b.first / job.tile * job.tile : b.first;
  const int rows = min(shared ? job.tile : kBlock, b.count - first);
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
    tile_mean[c] = 0.0f;
  }
  if (job.tile_mean != nullptr) {
    for (int r = warp(); r < rows; r += kWarps) {
      const bool bad = is_poisoned(job.batch.dtype, job.x, row0 + r * job.x.token, d);
      if (lane() == 0) poisoned[r] = bad;
    }
    __syncthreads();
    if (c < d) {
      double sum = 0;
      int counted = 0;
      for (int r = 0; r < rows; ++r)
        if (!poisoned[r]) sum += static_cast<double>(raw(r, c)), ++counted;
      if (counted > 0) tile_mean[c] = static_cast<float>(sum / counted);
      job.tile_mean[b.at * d + c] = tile_mean[c];
    }
  }
  __syncthreads();
  const auto smooth = [&](int r, int channel) {
    const float x = job.mean == nullptr ? raw(r, channel) : raw(r, channel) - mean[channel];
    return job.tile_mean == nullptr ? x : x - tile_mean[channel];
  };

  for (int r = warp(); r < rows; r += kWarps) {
    float top = 0.0f;
    bool bad = false;
    for (int ch = lane(); ch < d; ch += 32) {
      const float x = fabsf(smooth(r, ch));
      bad |= !numerics::is_finite(x);
      top = fmaxf(top, x);
    }
    bad = warp_any(bad);
    top = warp_max(top);
    if (lane() == 0) amax[r] = bad ? 0.0f : top, poisoned[r] = bad;
  }
  __syncthreads();

  float tile_amax = 0.0f;
  bool tile_poisoned = false, block_poisoned = false;
  for (int r = 0; r < rows; ++r) {
    tile_amax = fmaxf(tile_amax, amax[r]);
    tile_poisoned |= poisoned[r];
    block_poisoned |= poisoned[r] && r >= own && r < own + kBlock;
  }
  if (c == 0) {
    job.to.poisoned[b.at] = block_poisoned;
    if (job.tile_scale != nullptr)
      job.tile_scale[b.at] = tile_poisoned ? NAN : numerics::scale_of(tile_amax);
  }
  for (int r = own + warp(); r < own + b.rows; r += kWarps) {
    const int64_t token = (job.queries ? b.s.q_first : b.s.k_first) + first + r;
    const int64_t to = b.head * job.tokens + token;
    const float scale = numerics::scale_of(job.scale_by_tile ? tile_amax : amax[r]);
    const float inverse = numerics::inverse_of(scale);
    if (lane() == 0 && job.to.scale != nullptr) job.to.scale[to] = poisoned[r] ? NAN : scale;
    for (int ch = lane(); ch < job.pitch; ch += 32) {
      if (job.to.codes != nullptr)
        job.to.codes[to * job.pitch + ch] =
            ch >= d || poisoned[r]
                ? int8_t{0}
                : static_cast<int8_t>(numerics::code_nearest(smooth(r, ch), inverse));
      if (job.to.values != nullptr)
        job.to.values[to * job.pitch + ch] = ch >= d               ? 0.0f
                                             : job.mean == nullptr ? raw(r, ch)
                                                                   : raw(r, ch) - mean[ch];
    }
  }
}

// ---- queries

__global__ void __launch_bounds__(kThreads) row_kernel(RowJob job) {
  const Place b(job.batch, true);
  const float* mean = job.k_mean == nullptr
                          ? nullptr
                          : job.k_mean + (static_cast<int64_t>(b.s.index) * (job.h / job.group) +
                                          b.head / job.group) *
                                             job.d;
  for (int r = warp(); r < b.rows; r += kWarps) {
    const int64_t token = b.s.q_begin + b.first + r;
    const int64_t to = b.head * job.tq + b.s.q_first + b.first + r;
    const int64_t q = tile::offset_of(job.q, b.s, b.head, token);
    double dot = 0;
    for (int c = lane(); c < job.d && mean != nullptr; c += 32)
      dot +=
          static_cast<double>(read(job.batch.dtype, job.q, q + c)) * static_cast<double>(mean[c]);
    const double mean_logit = static_cast<double>(job.scale) * warp_sum(dot);
    if (lane() == 0) job.mean_logit[to] = mean_logit;
    if (job.lse2 == nullptr) continue;

    const int64_t o = tile::offset_of(job.o, b.s, b.head, token),
                  dout = tile::offset_of(job.dout, b.s, b.head, token);
    double delta = 0;
    for (int c = lane(); c < job.d; c += 32)
      delta += static_cast<double>(read(job.batch.dtype, job.dout, dout + c)) *
               static_cast<double>(read(job.batch.dtype, job.o, o + c));
    delta = warp_sum(delta);
    if (lane() != 0) continue;
    const float lse = *tile::stat_of(job.lse, b.s, b.head, token);
    const bool active = lse != -INFINITY;
    if (job.dlse.data != nullptr)
      delta -= static_cast<double>(*tile::stat_of(job.dlse, b.s, b.head, token));
    job.lse2[to] =
        active
            ? static_cast<float>((static_cast<double>(lse) - mean_logit) * (1.0 / numerics::kLn2))
            : -INFINITY;
    job.delta[to] = active ? static_cast<float>(delta) : 0.0f;
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
  launch(mean_part_kernel, grid_of(job.batch.k_blocks, job.heads), kThreads, 0, job, stream);
  launch(mean_kernel, grid_of(job.batch.seq.count, job.heads), kThreads, 0, job, stream);
}

void launch_tokens(const TokenJob& job, cudaStream_t stream) {
  launch(token_kernel, grid_of(job.queries ? job.batch.q_blocks : job.batch.k_blocks, job.heads),
         kThreads, 0, job, stream);
}

void launch_rows(const RowJob& job, cudaStream_t stream) {
  launch(row_kernel, grid_of(job.batch.q_blocks, job.h), kThreads, 0, job, stream);
}

void launch_max(const MaxJob& job, cudaStream_t stream) {
  const int64_t items = static_cast<int64_t>(job.batch.seq.count) * job.h;
  launch(max_kernel, dim3(static_cast<unsigned>((items + kThreads - 1) / kThreads)), kThreads, 0,
         job, stream);
}

}  // namespace sagebwd::cuda::plain
