// SPDX-License-Identifier: Apache-2.0
// Online softmax over key tiles. A thread block has 64 queries and 128 channels of O; head dims
// above 128 take two thread blocks, which find the same logits.
//
// Codes of P need the largest logit of the whole tile. So a tile of more than one block is visited
// twice, first for the maximum and then for P. The second time goes backwards, because the logits
// of the last block are still in registers.
#include "cuda/host/launch.h"
#include "cuda/plain/forward.h"
#include "cuda/plain/scores.cuh"

namespace sagebwd::cuda::plain {
namespace {

/// Largest value of the four lanes that share a row.
__device__ float quad_max(float x) {
  x = fmaxf(x, __shfl_xor_sync(0xffffffffu, x, 1));
  return fmaxf(x, __shfl_xor_sync(0xffffffffu, x, 2));
}
__device__ float quad_sum(float x) {
  x += __shfl_xor_sync(0xffffffffu, x, 1);
  return x + __shfl_xor_sync(0xffffffffu, x, 2);
}
__device__ bool quad_any(bool x) {
  int y = x;
  y |= __shfl_xor_sync(0xffffffffu, y, 1);
  return (y | __shfl_xor_sync(0xffffffffu, y, 2)) != 0;
}

/// What a row carries from tile to tile.
struct RowState {
  float top = -INFINITY;   // running maximum
  float sum = 0.0f;        // this thread's share of Σ 2^(logit - top)
  bool seen = false;       // whether the row had a visible key
  bool nan_logit = false;  // this thread's share; the maximum drops NaN, P does not
};

/// One thread block's work.
struct Block {
  const ForwardParams& p;
  Shared& shared;
  int head, kv, channel;
  int64_t block;
  const Sequence& s;
  int q0;
  tile::Range seen;  // keys that any of the queries sees
  tile::Walk walk;   // the tiles that hold them
  int leading;       // the first steps of the walk, whose P·V runs in floating point
  RowState row[2];
  Result result = {};

  __device__ Block(const ForwardParams& params, Shared& memory)
      : p(params),
        shared(memory),
        head(static_cast<int>(blockIdx.x / params.batch.q_blocks)),
        kv(head / params.group),
        channel(static_cast<int>(blockIdx.y) * kResultChannels),
        block(blockIdx.x % params.batch.q_blocks),
        s(memory.sequence),
        q0(static_cast<int>(block - s.q_block) * kBlock),
        seen(tile::keys_seen(params.mask, s, q0, min(q0 + kBlock, s.nq) - 1)),
        walk(tile::walk_of(seen, params.tile_k)),
        leading(walk.leading(params.pv16_tiles)) {}

  __device__ Pair pair(int k0) const { return Pair(p, s, head, kv, q0, k0); }
  __device__ void logits_of(const Pair& here, Fragment<float>& x) {
    load_pair(here, shared, [](int) { return true; });
    logits(here, (p.lifted & kMatmulS) != 0, shared, x);
  }

  /// Largest logit of each of the thread's rows over the keys of a tile. `held` is the block whose
  /// logits are left in x, or -1.
  __device__ void measure(int begin, int end, Fragment<float>& x, int& held, float (&top)[2]) {
    const Position at;
    top[0] = top[1] = -INFINITY;
    held = -1;
    for (int k0 = begin; k0 < end; k0 += kBlock) {
      if (!overlaps(seen, k0)) continue;
      logits_of(pair(k0), x);
      held = k0;
      const Spans spans(shared);
      for_elements(x, [&](float& logit, int r, int, int col) {
        if (!spans.sees(r, col)) return;
        row[r].nan_logit |= isnan(logit);
        top[r] = fmaxf(top[r], logit);
      });
    }
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      top[r] = quad_max(top[r]);
      if (at.t == 0) shared.part[at.warp_col][at.row(r)] = top[r];
    }
    __syncthreads();
#pragma unroll
    for (int r = 0; r < 2; ++r)
      top[r] = fmaxf(shared.part[0][at.row(r)], shared.part[1][at.row(r)]);
    __syncthreads();
  }

  __device__ void visit(int step) {
    const Position at;
    const int begin = walk.tile(step) * p.tile_k, end = min(begin + p.tile_k, s.nk);
    Fragment<float> x;
    int held;
    float tile_top[2];
    measure(begin, end, x, held, tile_top);
    if (held < 0) return;

    const float v_scale = p.v_scale[kv * p.batch.k_blocks + s.k_block + begin / kBlock];
    const bool floating = step < leading || isnan(v_scale);
    float alpha[2], beta[2], factor[2];
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      alpha[r] = 1.0f, beta[r] = factor[r] = 0.0f;
      if (q0 + at.row(r) >= s.nq) continue;
      const tile::Range keys = tile::visible(p.mask, s, q0 + at.row(r));
      if (keys.begin >= end || keys.end <= begin || keys.begin >= keys.end) continue;
      const float top = fmaxf(row[r].top, tile_top[r]);
      alpha[r] = row[r].seen ? exp2f(row[r].top - top) : 0.0f;
      beta[r] = exp2f(tile_top[r] - top);
      factor[r] = floating ? beta[r] : beta[r] * v_scale / p.p_levels;
      row[r].top = top, row[r].seen = true;
      row[r].sum *= alpha[r];
    }
#pragma unroll
    for (auto& part : result) for_elements(part, [&](float& o, int r, int, int) { o *= alpha[r]; });

    for (int k0 = begin + (end - begin - 1) / kBlock * kBlock; k0 >= begin; k0 -= kBlock) {
      if (!overlaps(seen, k0)) continue;
      const Pair here = pair(k0);
      if (k0 != held) logits_of(here, x);
      const Spans spans(shared);
      for_elements(x, [&](float& y, int r, int, int col) {
        y = spans.sees(r, col) ? exp2f(y - tile_top[r]) : 0.0f;
        row[r].sum += y * beta[r];
      });
      values(here, x, floating, factor);
    }
  }

  /// result += P·V of one block of keys.
  __device__ void values(const Pair& here, Fragment<float>& x, bool floating,
                         const float (&factor)[2]) {
    if (floating) {
      for_elements(x, [&](float& y, int, int line, int col) {
        shared.weights[line * kWeightLine + col] = y;
      });
      add_product(
          here.keys(p.v.values), p.v.poisoned[here.k_block()] != 0, factor, channel, shared, result,
          [&](int line, int key) { return key >= shared.begin[line] && key < shared.end[line]; });
      return;
    }
    const Rounder round(here, numerics::DitherOperand::p_forward, p.p_levels);
    const Spans spans(shared);
    for_elements(x, [&](float& y, int r, int line, int col) {
      shared.codes[line * kTokenLine + col] =
          spans.sees(r, col) ? round(y, p.p_levels, line, col) : int8_t{0};
    });
    add_product<arch::Bytes::u8>(here.keys(p.v.codes), factor, channel, shared, result);
  }

  __device__ void finish() {
    const Position at;
    float sum[2];
    bool nan_logit[2];
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      sum[r] = quad_sum(row[r].sum);
      nan_logit[r] = quad_any(row[r].nan_logit);
      if (at.t == 0) {
        shared.part[at.warp_col][at.row(r)] = sum[r];
        shared.part[2 + at.warp_col][at.row(r)] = nan_logit[r] ? 1.0f : 0.0f;
      }
    }
    __syncthreads();
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const int line = at.row(r);
      sum[r] = shared.part[0][line] + shared.part[1][line];
      nan_logit[r] = shared.part[2][line] + shared.part[3][line] != 0.0f;
    }
    const float* mean = p.v_mean == nullptr
                            ? nullptr
                            : p.v_mean + (static_cast<int64_t>(s.index) * p.hk + kv) * p.d;
#pragma unroll
    for (int part = 0; part < kResultChannels / kChannels; ++part)
      for_elements(result[part], [&](float& o, int r, int line, int col) {
        const int c = channel + part * kChannels + col;
        if (q0 + line >= s.nq || c >= p.d) return;
        const float value = row[r].seen ? o / sum[r] + (mean == nullptr ? 0.0f : mean[c]) : 0.0f;
        write(p.batch.dtype, p.o, tile::offset_of(p.o, s, head, s.q_begin + q0 + line) + c, value);
      });
    if (blockIdx.y != 0) return;

#pragma unroll
    for (int r = 0; r < 2; ++r) {
      if (at.t != 0 || at.warp_col != 0) continue;
      const int i = q0 + at.row(r);
      float logit = -INFINITY;
      if (i < s.nq) {
        float lse = -INFINITY;
        if (row[r].seen) {
          const double mean_logit = p.mean_logit[head * p.tq + s.q_first + i],
                       top = static_cast<double>(row[r].top);
          lse = static_cast<float>(numerics::kLn2 * (top + log2(static_cast<double>(sum[r]))) +
                                   mean_logit);
          logit = nan_logit[r] ? NAN : static_cast<float>(numerics::kLn2 * top + mean_logit);
        }
        *tile::stat_of(p.lse, s, head, s.q_begin + i) = lse;
      }
      shared.line[at.row(r)] = logit;
    }
    __syncthreads();
    if (threadIdx.x != 0) return;
    float largest = -INFINITY;
    for (int line = 0; line < kBlock; ++line)
      if (isnan(shared.line[line]) || largest < shared.line[line]) largest = shared.line[line];
    p.block_max[head * p.batch.q_blocks + block] = largest;
  }
};

__global__ void __launch_bounds__(kThreads, 2)
    forward_kernel(const __grid_constant__ ForwardParams p) {
  __shared__ Shared shared;
  if (threadIdx.x == 0)
    shared.sequence = sequence_of_block(p.batch.seq, blockIdx.x % p.batch.q_blocks, true);
  __syncthreads();
  Block b(p, shared);
  for (int step = 0; step < b.walk.steps; ++step) b.visit(step);
  b.finish();
}

}  // namespace

void launch_forward(const ForwardParams& p, cudaStream_t stream) {
  launch(forward_kernel,
         dim3(static_cast<unsigned>(p.batch.q_blocks * p.h),
              static_cast<unsigned>((p.d + kResultChannels - 1) / kResultChannels)),
         kThreads, 0, p, stream);
}

}  // namespace sagebwd::cuda::plain
