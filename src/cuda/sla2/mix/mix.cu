// SPDX-License-Identifier: Apache-2.0
#include "cuda/host/launch.h"
#include "cuda/sla2/mix/eight.cuh"

namespace sagebwd::cuda::sla2::mix {
namespace {

/// The piece of a thread block, and the rows of a thread in it.
template <int kLanes>
struct Spot {
  static constexpr int kRows = kThreads / kLanes;  // at once
  static constexpr int kTurns = kPiece / kRows, kTogether = kTurns < 2 ? kTurns : 2;
  int batch, head, piece, channel, row;
  const float* alpha;  // of the head

  // Heads come before pieces, so that neighbours in memory are worked on together.
  __device__ explicit Spot(const MixJob& p) {
    const int at = static_cast<int>(blockIdx.x), thread = static_cast<int>(threadIdx.x);
    head = at % p.heads, piece = at / p.heads % p.pieces, batch = at / p.heads / p.pieces;
    channel = thread % kLanes * 8, row = thread / kLanes;
    const int64_t of_batch = p.alpha_of_batch ? static_cast<int64_t>(batch) * p.heads : 0;
    alpha = p.alpha + (of_batch + head) * p.alpha_rows;
  }
  __device__ int token(int turn) const { return piece * kPiece + turn * kRows + row; }
  __device__ bool real(const MixJob& p, int token) const {
    return token < p.tokens && channel < p.d;
  }
  /// Whether anything is left for the linear branch.
  __device__ bool left(const MixJob& p, int token) const {
    return p.norm.data == nullptr ||
           p.norm.data[batch * p.norm.batch + head * p.norm.head + token * p.norm.token] != 0.0f;
  }
  template <typename T>
  __device__ __forceinline__ T* at(const Strided& x, int token) const {
    return row_of<T>(x, batch, head, token) + channel;
  }
};

}  // namespace

template <typename T, int kLanes>
__global__ void __launch_bounds__(kThreads) mix_forward_kernel(const __grid_constant__ MixJob p) {
  using S = Spot<kLanes>;
  const S me(p);
#pragma unroll 1
  for (int turn = 0; turn < S::kTurns; turn += S::kTogether) {
    Eight<T> sparse[S::kTogether], linear[S::kTogether];
#pragma unroll
    for (int i = 0; i < S::kTogether; ++i) {
      const int token = me.token(turn + i);
      if (!me.real(p, token)) continue;
      sparse[i].load(me.template at<const T>(p.sparse, token), p.sparse.vector);
      linear[i].load(me.template at<const T>(p.linear, token), p.linear.vector);
    }
#pragma unroll
    for (int i = 0; i < S::kTogether; ++i) {
      const int token = me.token(turn + i);
      if (!me.real(p, token)) continue;
      if (me.left(p, token)) {
        const float alpha = me.alpha[token / p.alpha_block];
        float x[8];
#pragma unroll
        for (int c = 0; c < 8; ++c)
          x[c] = alpha * sparse[i].get(c) + (1.0f - alpha) * linear[i].get(c);
        sparse[i].set(x);
      }
      sparse[i].store(me.template at<T>(p.out, token), p.out.vector);
    }
  }
}

template <typename T, int kLanes>
__global__ void __launch_bounds__(kThreads) mix_backward_kernel(const __grid_constant__ MixJob p) {
  using S = Spot<kLanes>;
  __shared__ float sums[kThreads / 32];
  const S me(p);
  const int64_t head = static_cast<int64_t>(me.batch) * p.heads + me.head;  // of all
  float total = 0.0f;  // of the lane's channels of dα
#pragma unroll 1
  for (int turn = 0; turn < S::kTurns; turn += S::kTogether) {
    Eight<T> dout[S::kTogether], sparse[S::kTogether], linear[S::kTogether];
#pragma unroll
    for (int i = 0; i < S::kTogether; ++i) {
      const int token = me.token(turn + i);
      if (!me.real(p, token)) continue;
      dout[i].load(me.template at<const T>(p.dout, token), p.dout.vector);
      if (p.dalpha == nullptr) continue;
      sparse[i].load(me.template at<const T>(p.sparse, token), p.sparse.vector);
      if (p.linear.data == nullptr)
        linear[i].clear();
      else
        linear[i].load(me.template at<const T>(p.linear, token), p.linear.vector);
    }
#pragma unroll
    for (int i = 0; i < S::kTogether; ++i) {
      const int token = me.token(turn + i);
      float dot = 0.0f;
      if (me.real(p, token)) {
        Eight<T> dlinear;
        dlinear.clear();
        if (me.left(p, token)) {
          const float alpha = me.alpha[token / p.alpha_block];
          float x[8];
          if (p.dalpha != nullptr) {
#pragma unroll
            for (int c = 0; c < 8; ++c)
              dot += dout[i].get(c) * (sparse[i].get(c) - linear[i].get(c));
          }
#pragma unroll
          for (int c = 0; c < 8; ++c) x[c] = (1.0f - alpha) * dout[i].get(c);
          dlinear.set(x);
#pragma unroll
          for (int c = 0; c < 8; ++c) x[c] = alpha * dout[i].get(c);
          dout[i].set(x);
        }
        dout[i].store(me.template at<T>(p.dsparse, token), p.dsparse.vector);
        if (p.dlinear.data != nullptr)
          dlinear.store(me.template at<T>(p.dlinear, token), p.dlinear.vector);
      }
      total += dot;
      if (p.dalpha == nullptr || p.alpha_block != 1) continue;
      dot = sum_of_lanes<kLanes>(dot);
      if (me.channel == 0 && token < p.tokens) p.dalpha[head * p.tokens + token] = dot;
    }
  }
  if (p.dalpha == nullptr || p.alpha_block == 1) return;
  total = sum_of_lanes<32>(total);
  if (threadIdx.x % 32 == 0) sums[threadIdx.x / 32] = total;
  __syncthreads();
  if (threadIdx.x != 0) return;
  for (int warp = 1; warp < kThreads / 32; ++warp) total += sums[warp];
  p.dalpha[head * p.pieces + me.piece] = total;
}

/// A warp has a result.
__global__ void __launch_bounds__(kThreads)
    alpha_sums_kernel(const __grid_constant__ AlphaSumsJob p) {
  const int lane = static_cast<int>(threadIdx.x % 32);
  const int64_t result = static_cast<int64_t>(blockIdx.x) * (kThreads / 32) + threadIdx.x / 32;
  if (result >= p.results) return;
  const int64_t head = result / p.rows;  // of all that have an α of their own
  const int first = static_cast<int>(result % p.rows) * p.of_row,
            count = min(p.of_row, p.of_head - first);
  float sum = 0.0f;
  for (int batch = 0; batch < p.batches; ++batch) {
    const float* const from =
        p.parts + (head + static_cast<int64_t>(batch) * p.heads) * p.of_head + first;
#pragma unroll 4
    for (int i = lane; i < count; i += 32) sum += from[i];
  }
  sum = sum_of_lanes<32>(sum);
  if (lane == 0) p.dalpha[result] = sum;
}

namespace {

dim3 grid_of(const MixJob& job) {
  return dim3(static_cast<unsigned>(job.batches * job.heads * job.pieces));
}

}  // namespace

void launch_forward(const Kind& kind, const MixJob& job) {
  dispatch(kind, [&](auto type, auto lanes) {
    launch(mix_forward_kernel<decltype(type), lanes()>, grid_of(job), kThreads, 0, job,
           kind.stream);
  });
}

void launch_backward(const Kind& kind, const MixJob& job) {
  dispatch(kind, [&](auto type, auto lanes) {
    launch(mix_backward_kernel<decltype(type), lanes()>, grid_of(job), kThreads, 0, job,
           kind.stream);
  });
}

void launch_alpha_sums(const AlphaSumsJob& job, cudaStream_t stream) {
  constexpr int kWarps = kThreads / 32;
  launch(alpha_sums_kernel, dim3(static_cast<unsigned>((job.results + kWarps - 1) / kWarps)),
         kThreads, 0, job, stream);
}

}  // namespace sagebwd::cuda::sla2::mix
