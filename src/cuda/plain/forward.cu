// SPDX-License-Identifier: Apache-2.0
// Online softmax over key tiles. A thread block has 64 queries and 128 channels of O; head dims
// above 128 take two thread blocks, which find the same logits.
//
// Codes of P need the largest logit of the whole tile. So a tile of more than one block is visited
// twice, first for the maximum and then for P. The second time goes backwards, because the logits
// of the last block are still in registers.
//
// Where V has a scale per token, the exponent of a key is its logit plus the logarithm of that
// scale: P·s_V has the running maximum and the codes, and the row sum takes the scale out again.
//
// V lacks the centre of its octave there. O gets it back when the walk leaves the octave: P's row
// sum over those keys, times the centre.
//
// Nothing here lets one row change another: rows share tiles, but no number of a row is made from
// another one's, and adding the zeros of a masked block changes no bit. Recipe `vectorwise`
// promises that.
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
/// The larger one; NaN stays.
__device__ float larger(float x, float y) { return x < y || isnan(y) ? y : x; }
__device__ float quad_larger(float x) {
  x = larger(x, __shfl_xor_sync(0xffffffffu, x, 1));
  return larger(x, __shfl_xor_sync(0xffffffffu, x, 2));
}

/// What a row carries from tile to tile.
struct RowState {
  float top = -INFINITY;    // running maximum of the exponents; drops NaN
  float sum = 0.0f;         // this thread's share of Σ 2^(logit - top), over keys of the octave
  float before = 0.0f;      // all of it, over those of octaves that the walk has left
  bool seen = false;        // whether the row had a visible key
  float logit = -INFINITY;  // this thread's share of the largest logit; NaN if one is
};

/// How P·V of a tile runs.
enum class Product {
  codes,    // codes of P by codes of V
  leading,  // P by codes of V
  values,   // P by V: lifted out of INT8, or V holds NaN or Inf in `paper`
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
  RowState row[2];
  int octave = 0;  // whose keys are summed up
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
        walk(tile::walk_of(seen, params.tile_k)) {}

  __device__ Pair pair(int k0) const { return Pair(p, s, head, kv, q0, k0); }
  __device__ void logits_of(const Pair& here, Fragment<float>& x) {
    load_pair(here, shared, [](int) { return true; });
    if (threadIdx.x >= kThreads - kBlock) {
      const int col = static_cast<int>(threadIdx.x) % kBlock;
      float scale = p.folds_v && col < here.cols ? p.v.scale[here.k_at + col] : 1.0f;
      if (isnan(scale)) scale = 1.0f;  // its codes are zero
      shared.v_log2[col] = log2f(scale), shared.v_inverse[col] = 1.0f / scale;
    }
    logits(here, (p.lifted & kMatmulS) != 0, shared, x);
    if (!p.cap.on()) return;
    for_elements(x, [&](float& y, int, int, int) { y = numerics::capped(p.cap, y); });
  }

  /// Whether block lists, if there are any, have the tile of keys that starts at `begin`.
  __device__ bool is_listed(int begin) const {
    return p.lists.listed == nullptr || has_bit(p, p.lists.listed, s, head, q0, begin);
  }

  /// Whether V of a tile holds NaN or Inf.
  __device__ bool poisoned(int begin, int end) const {
    int any = 0;
    for (int k0 = begin; k0 < end; k0 += kBlock) any |= p.v.poisoned[pair(k0).k_block()];
    return any != 0;
  }
  __device__ Product product_of(int begin, int end) const {
    if ((p.lifted & kMatmulO) != 0 || (!p.folds_v && poisoned(begin, end))) return Product::values;
    const bool leads = p.lists.listed != nullptr && has_bit(p, p.lists.leading, s, head, q0, begin);
    return leads ? Product::leading : Product::codes;
  }

  /// Largest exponent of each of the thread's rows over the keys of a tile. `held` is the block
  /// whose logits are left in x, or -1.
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
        row[r].logit = larger(row[r].logit, logit);
        top[r] = fmaxf(top[r], logit + shared.v_log2[col]);
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
    if (!is_listed(begin)) return;
    Fragment<float> x;
    int held;
    float tile_top[2];
    const Product product = product_of(begin, end);
    if (p.v_centres.codes != nullptr && octave_of_key(begin) != octave) {
      leave_octave();
      octave = octave_of_key(begin);
    }
    measure(begin, end, x, held, tile_top);
    if (held < 0) return;

    // What is left to multiply where the scale of V is one for the tile.
    const float v_scale =
        p.folds_v || product == Product::values ? 1.0f : p.v.scale[pair(begin).k_at];
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
      factor[r] = beta[r] * v_scale;
      if (product == Product::codes) factor[r] /= p.p_levels;
      row[r].top = top, row[r].seen = true;
      row[r].sum *= alpha[r], row[r].before *= alpha[r];
    }
#pragma unroll
    for (auto& part : result) for_elements(part, [&](float& o, int r, int, int) { o *= alpha[r]; });

    for (int k0 = begin + (end - begin - 1) / kBlock * kBlock; k0 >= begin; k0 -= kBlock) {
      if (!overlaps(seen, k0)) continue;
      const Pair here = pair(k0);
      if (k0 != held) logits_of(here, x);
      const Spans spans(shared);
      for_elements(x, [&](float& y, int r, int, int col) {
        y = spans.sees(r, col) ? exp2f(y + shared.v_log2[col] - tile_top[r]) : 0.0f;
        row[r].sum += y * shared.v_inverse[col] * beta[r];
      });
      values(here, x, product, factor);
    }
  }

  /// result += P·V of one block of keys.
  __device__ void values(const Pair& here, Fragment<float>& x, Product product,
                         const float (&factor)[2]) {
    if (product != Product::codes) {
      for_elements(x, [&](float& y, int, int line, int col) {
        shared.weights[line * kWeightLine + col] = y;
      });
      const auto sees = [&](int line, int key) {
        return key >= shared.begin[line] && key < shared.end[line];
      };
      if (product == Product::leading)
        add_product(here.values(p.v.codes), false, factor, channel, shared, result, sees);
      else
        add_product(here.values(p.v.values), p.v.poisoned[here.k_block()] != 0, factor, channel,
                    shared, result, sees);
      return;
    }
    const Rounder round(here, kMatmulO, numerics::DitherOperand::p_forward, p.p_levels);
    const Spans spans(shared);
    for_elements(x, [&](float& y, int r, int line, int col) {
      shared.codes[line * kTokenLine + col] =
          spans.sees(r, col) ? round(y, p.p_levels, line, col) : int8_t{0};
    });
    add_product<arch::Bytes::u8>(here.values(p.v.codes), factor, channel, shared, result);
  }

  /// Ends the sums over the keys of an octave. A row that sees none of them stays what it is.
  __device__ void leave_octave() {
    const Position at;
    float sum[2];
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      sum[r] = quad_sum(row[r].sum);
      if (at.t == 0) shared.part[at.warp_col][at.row(r)] = sum[r];
    }
    __syncthreads();
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      sum[r] = shared.part[0][at.row(r)] + shared.part[1][at.row(r)];
      row[r].before += sum[r], row[r].sum = 0.0f;
    }
    __syncthreads();
    if (p.v_centres.codes == nullptr || octave < numerics::kFirstValueCentre) return;
    const int64_t centre = centre_row(p.v_centres, s, kv, octave);
#pragma unroll
    for (int part = 0; part < kResultChannels / kChannels; ++part)
      for_elements(result[part], [&](float& o, int r, int, int col) {
        const int c = channel + part * kChannels + col;
        if (c < p.value_d) o += sum[r] * centre_value(p.v_centres, p.value_d, centre, c);
      });
  }

  /// Finds the rows that see a value which holds NaN or Inf.
  __device__ void find_marked(bool (&marked)[2]) const {
    const Position at;
    marked[0] = marked[1] = false;
    for (int step = 0; step < walk.steps && p.folds_v; ++step) {
      const int begin = walk.tile(step) * p.tile_k, end = min(begin + p.tile_k, s.nk);
      if (!is_listed(begin) || !poisoned(begin, end)) continue;
      for (int r = 0; r < 2; ++r) {
        const tile::Range keys = tile::visible(p.mask, s, q0 + at.row(r));
        const int64_t first = pair(0).k_at;
        for (int key = max(begin, keys.begin); key < min(end, keys.end); ++key)
          marked[r] |= isnan(p.v.scale[first + key]);
      }
    }
  }

  __device__ void finish() {
    const Position at;
    bool marked[2];
    find_marked(marked);
    leave_octave();
    float logit[2];
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      logit[r] = quad_larger(row[r].logit);
      if (at.t == 0) shared.part[at.warp_col][at.row(r)] = logit[r];
    }
    __syncthreads();
#pragma unroll
    for (int r = 0; r < 2; ++r)
      logit[r] = larger(shared.part[0][at.row(r)], shared.part[1][at.row(r)]);
#pragma unroll
    for (int part = 0; part < kResultChannels / kChannels; ++part)
      for_elements(result[part], [&](float& o, int r, int line, int col) {
        const int c = channel + part * kChannels + col;
        if (q0 + line >= s.nq || c >= p.value_d) return;
        float value = row[r].seen ? o / row[r].before : 0.0f;
        if (marked[r]) value = NAN;
        if (p.batch.dtype == Dtype::f16) value = numerics::within_f16(value);
        write(p.batch.dtype, p.o, tile::offset_of(p.o, s, head, s.q_begin + q0 + line) + c, value);
      });
    if (blockIdx.y != 0) return;

#pragma unroll
    for (int r = 0; r < 2; ++r) {
      if (at.t != 0 || at.warp_col != 0) continue;
      const int i = q0 + at.row(r);
      float true_logit = -INFINITY;
      if (i < s.nq) {
        float lse = -INFINITY;
        if (row[r].seen) {
          const double mean_logit =
                           p.cap.on() || p.mean_logit == nullptr  // nothing is missing
                               ? 0.0
                               : static_cast<double>(p.mean_logit[head * p.tq + s.q_first + i]),
                       top = static_cast<double>(row[r].top);
          lse = static_cast<float>(
              numerics::kLn2 * (top + log2(static_cast<double>(row[r].before))) + mean_logit);
          true_logit =
              static_cast<float>(numerics::kLn2 * static_cast<double>(logit[r]) + mean_logit);
        }
        *tile::stat_of(p.lse, s, head, s.q_begin + i) = lse;
      }
      shared.line[at.row(r)] = true_logit;
    }
    __syncthreads();
    if (threadIdx.x != 0) return;
    float largest = -INFINITY;
    for (int line = 0; line < kBlock; ++line) largest = larger(largest, shared.line[line]);
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
              static_cast<unsigned>((p.value_d + kResultChannels - 1) / kResultChannels)),
         kThreads, 0, p, stream);
}

}  // namespace sagebwd::cuda::plain
