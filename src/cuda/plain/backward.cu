// SPDX-License-Identifier: Apache-2.0
// One gradient is a sum over tiles of dS·K (dQ), dSᵀ·Q (dK) or Pᵀ·dO (dV). A thread block owns 64
// lines of it, queries for dQ and keys for the others, and 128 channels; it walks over the tiles of
// the other side.
//
// A scale covers a line of a tile, or the whole tile in `paper`. So a tile of more than one block
// is visited twice, first for the maxima and then for the codes. The second time goes backwards,
// because the values of the last block are still in registers. In `paper` the first time also
// covers the lines of the tile that other thread blocks own.
#include "cuda/host/launch.h"
#include "cuda/plain/backward.h"
#include "cuda/plain/scores.cuh"
#include "cuda/plain/turn_back.h"

namespace sagebwd::cuda::plain {
namespace {

enum class Gradient { dq, dk, dv };

/// Sum over the lanes whose indices differ in the bits first … last.
template <typename T>
__device__ T sum_lanes(T x, int first, int last) {
  for (int m = first; m <= last; m *= 2) x += __shfl_xor_sync(0xffffffffu, x, m);
  return x;
}
__device__ int max_lanes(int x, int first, int last) {
  for (int m = first; m <= last; m *= 2) x = max(x, __shfl_xor_sync(0xffffffffu, x, m));
  return x;
}

/// One thread block's work.
template <Gradient kGradient>
struct Block {
  static constexpr bool kByQuery = kGradient == Gradient::dq;  // lines are queries
  static constexpr Matmul kMatmul = kGradient == Gradient::dq   ? kMatmulDQ
                                    : kGradient == Gradient::dk ? kMatmulDK
                                                                : kMatmulDV;
  static constexpr numerics::DitherOperand kOperand =
      kGradient == Gradient::dq   ? numerics::DitherOperand::ds_query
      : kGradient == Gradient::dk ? numerics::DitherOperand::ds_key
                                  : numerics::DitherOperand::p_backward;

  const BackwardParams& p;
  Shared& shared;
  int own_head, channel;
  int64_t block;
  const Sequence& s;
  int line0;         // first line inside the sequence
  tile::Range seen;  // tokens of the other side that they see
  int lines, steps;  // tokens of the sequence on this side and on the other
  int tile_lines, tile_steps;
  Result result = {};
  double row_sum[2] = {};  // this thread's share of Σ dS, or of what the cap takes from it
  bool counts = false;     // whether `gradients` adds to the latter: it sees some blocks twice

  __device__ static int64_t blocks(const Params& p) {
    return kByQuery ? p.batch.q_blocks : p.batch.k_blocks;
  }
  /// Of the gradient.
  __host__ __device__ static int channels(const Params& p) {
    return kGradient == Gradient::dv ? p.value_d : p.d;
  }
  __device__ Block(const BackwardParams& params, Shared& memory)
      : p(params),
        shared(memory),
        own_head(static_cast<int>(blockIdx.x / blocks(params))),
        channel(static_cast<int>(blockIdx.y) * kResultChannels),
        block(blockIdx.x % blocks(params)),
        s(memory.sequence),
        line0(static_cast<int>(block - (kByQuery ? s.q_block : s.k_block)) * kBlock),
        seen(seen_by(line0)),
        lines(kByQuery ? s.nq : s.nk),
        steps(kByQuery ? s.nk : s.nq),
        tile_lines(kByQuery ? params.tile_q : params.tile_k),
        tile_steps(kByQuery ? params.tile_k : params.tile_q) {}

  __device__ Pair pair(int head, int line, int step) const {
    return Pair(p, s, head, kByQuery ? head / p.group : own_head, kByQuery ? line : step,
                kByQuery ? step : line);
  }
  /// Tokens of the other side that have visible pairs with the block of lines.
  __device__ tile::Range seen_by(int line) const {
    const int last = min(line + kBlock, kByQuery ? s.nq : s.nk) - 1;
    return kByQuery ? tile::keys_seen(p.mask, s, line, last)
                    : tile::visible_to(p.mask, s, line, last);
  }
  /// The tiles of the other side that the lines visit with the queries of a head.
  __device__ tile::Walk walk(int) const { return tile::walk_of(seen, tile_steps); }

  /// Whether block lists, if there are any, have the pair of a tile that starts at `step`.
  __device__ bool is_listed(int head, int step) const {
    return p.lists.listed == nullptr ||
           has_bit(p, p.lists.listed, s, head, kByQuery ? line0 : step, kByQuery ? step : line0);
  }

  /// P for dV, dS for the others; zero where masked.
  __device__ void gradients(const Pair& here, Fragment<float>& x) {
    const Position at;
    load_pair(here, shared, [&](int row) { return p.lse2[here.q_at + row] != -INFINITY; });
    if (threadIdx.x >= kThreads - kBlock) {
      const int row = static_cast<int>(threadIdx.x) % kBlock;
      if (row < here.rows) {
        const int64_t i = here.q_at + row;
        const int octave = p.v_centres.codes != nullptr ? octave_of_key(here.k0) : 0;
        shared.lse2[row] = p.lse2[i];
        shared.delta[row] = p.delta[octave * (p.h * p.tq) + i];
        if (!kByQuery)
          shared.fold[row] = kGradient == Gradient::dv ? p.dout.scale[i] : p.q.scale[i];
      }
      if (kByQuery && row < here.cols) shared.fold[row] = p.dq_k.scale[here.k_at + row];
      if (kGradient != Gradient::dv && p.folds_v && row < here.cols)
        shared.v_scale[row] = p.v.scale[here.k_at + row];
    }
    logits(here, (p.lifted & kMatmulSRecompute) != 0, shared, x);
    const Spans spans(shared);
    const float lse2[2] = {shared.lse2[at.row(0)], shared.lse2[at.row(1)]},
                delta[2] = {shared.delta[at.row(0)], shared.delta[at.row(1)]};
    if (kGradient == Gradient::dv || !p.cap.on())  // else the slope of the cap needs the logit
      for_elements(x, [&](float& y, int r, int, int col) {
        if (p.cap.on()) y = numerics::capped(p.cap, y);
        y = spans.sees(r, col) ? exp2f(y - lse2[r]) : 0.0f;
      });
    if constexpr (kGradient == Gradient::dv) return;
    Fragment<float> dp;
    if (p.folds_v) {
      value_product(here, here.values(p.v.codes), dp);
      for_elements(dp, [&](float& y, int, int, int col) { y *= shared.v_scale[col]; });
    } else {
      value_product(here, here.values(p.v.values), dp);
    }
#pragma unroll
    for (int b = 0; b < 4; ++b)
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        const int r = e / 2;
        if (!spans.sees(r, at.col(b, e % 2))) {
          x[b][e] = 0.0f;
        } else if (!p.cap.on()) {
          x[b][e] = x[b][e] * (dp[b][e] - delta[r]);
        } else {
          const float logit = x[b][e];
          const float before =
              exp2f(numerics::capped(p.cap, logit) - lse2[r]) * (dp[b][e] - delta[r]);
          x[b][e] = before * numerics::cap_slope(p.cap, logit);
          if (counts) row_sum[r] += static_cast<double>(before) - static_cast<double>(x[b][e]);
        }
      }
  }

  /// dO·Vᵀ, V as values or as codes.
  template <typename T>
  __device__ void value_product(const Pair& here, const Rows<T>& v, Fragment<float>& dp) {
    const Rows<float> dout = here.gradients(p.dout.values);
    if (p.exact_inputs)
      channel_product<true>(dout, v, false, shared, dp);
    else
      channel_product<false>(dout, v, false, shared, dp);
  }

  /// A visible value times the token scale of the other operand. That scale varies along the
  /// contraction, so it cannot be applied to the integer sum.
  __device__ float folded(float x, int row, int col) const {
    return x * shared.fold[kByQuery ? col : row];
  }

  /// Largest folded magnitudes of 64 lines over a tile, into shared.line; NaN stays. `held` is the
  /// step whose values are left in x, or -1.
  __device__ void measure(int head, int line, int begin, int end, Fragment<float>& x, int& held) {
    const Position at;
    // Magnitudes are not negative, so their bits have their order, with NaN above all.
    int by_row[2] = {}, by_col[4][2] = {};
    held = -1;
    const tile::Range seen = seen_by(line);
    for (int step = begin; step < end; step += kBlock) {
      if (!overlaps(seen, step)) continue;
      counts = kGradient == Gradient::dq && p.sums_what_cap_takes && line == line0;
      gradients(pair(head, line, step), x);
      held = step;
      const Spans spans(shared);
#pragma unroll
      for (int b = 0; b < 4; ++b)
#pragma unroll
        for (int e = 0; e < 4; ++e) {
          const int r = e / 2, col = at.col(b, e % 2);
          if (!spans.sees(r, col)) continue;
          const int bits = __float_as_int(fabsf(folded(x[b][e], at.row(r), col)));
          if constexpr (kByQuery)
            by_row[r] = max(by_row[r], bits);
          else
            by_col[b][e % 2] = max(by_col[b][e % 2], bits);
        }
    }
    if constexpr (kByQuery) {
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        const int top = max_lanes(by_row[r], 1, 2);
        if (at.t == 0) shared.part[at.warp_col][at.row(r)] = __int_as_float(top);
      }
    } else {
#pragma unroll
      for (int b = 0; b < 4; ++b)
#pragma unroll
        for (int e = 0; e < 2; ++e) {
          const int top = max_lanes(by_col[b][e], 4, 16);
          if (at.g == 0) shared.part[at.warp_row][at.col(b, e)] = __int_as_float(top);
        }
    }
    __syncthreads();
    if (threadIdx.x < kBlock) {
      int top = 0;
      for (int part = 0; part < (kByQuery ? 2 : 4); ++part)
        top = max(top, __float_as_int(shared.part[part][threadIdx.x]));
      shared.line[threadIdx.x] = __int_as_float(top);
    }
    __syncthreads();
  }

  __device__ float levels() const {
    return kGradient == Gradient::dv ? p.p_levels : numerics::kLevels;
  }

  /// Finds the scales of the own lines in one tile, into shared.line and shared.inverse.
  __device__ void find_scales(int head, int begin, int end, Fragment<float>& x, int& held) {
    float tile_amax = 0.0f;
    const auto share = [&] {
      for (int n = 0; n < kBlock; ++n)
        if (numerics::is_finite(shared.line[n])) tile_amax = fmaxf(tile_amax, shared.line[n]);
      __syncthreads();
    };
    const bool per_tile = p.scheme == Scheme::paper;
    if (per_tile) {
      const int first = line0 / tile_lines * tile_lines;
      for (int line = first; line < min(first + tile_lines, lines); line += kBlock) {
        if (line == line0) continue;
        measure(head, line, begin, end, x, held);
        share();
      }
    }
    measure(head, line0, begin, end, x, held);
    if (per_tile) share();
    if (threadIdx.x < kBlock) {
      const float amax = shared.line[threadIdx.x];
      const float scale =
          numerics::scale_of(per_tile && numerics::is_finite(amax) ? tile_amax : amax, levels());
      shared.line[threadIdx.x] = scale;
      shared.inverse[threadIdx.x] = numerics::inverse_of(scale);
    }
    __syncthreads();
  }

  /// Adds the tile that begins at step `begin`.
  __device__ void visit(int head, int begin) {
    const Position at;
    const int end = min(begin + tile_steps, steps);
    const bool floating = (p.lifted & kMatmul) != 0;
    Fragment<float> x;
    int held = -1;
    float scale[2] = {1.0f, 1.0f};
    if (!floating) {
      find_scales(head, begin, end, x, held);
      scale[0] = shared.line[at.row(0)], scale[1] = shared.line[at.row(1)];
    }
    for (int step = begin + (end - begin - 1) / kBlock * kBlock; step >= begin; step -= kBlock) {
      if (!overlaps(seen, step)) continue;
      const Pair here = pair(head, line0, step);
      counts = floating && kGradient == Gradient::dq && p.sums_what_cap_takes;
      if (step != held) gradients(here, x);
      if (kGradient == Gradient::dq && p.partial_kv)
        for_elements(x, [&](float& y, int r, int, int) { row_sum[r] += static_cast<double>(y); });
      if (floating)
        add_values(here, x, scale);
      else
        add_codes(here, x, scale);
      if (kGradient == Gradient::dk && p.q_mean != nullptr && !floating) add_query_mean(here, x);
    }
    __syncthreads();  // before the next tile's scales
  }

  __device__ void add_codes(const Pair& here, Fragment<float>& x, const float (&scale)[2]) {
    const Rounder round(here, kMatmul, kOperand, levels());
    const Spans spans(shared);
    for_elements(x, [&](float& y, int r, int row, int col) {
      const int line = kByQuery ? row : col, step = kByQuery ? col : row;
      shared.codes[line * kTokenLine + step] =
          spans.sees(r, col) ? round(folded(y, row, col), shared.inverse[line], row, col)
                             : int8_t{0};
    });
    const Rows<int8_t> right = kGradient == Gradient::dq   ? here.keys(p.dq_k.codes)
                               : kGradient == Gradient::dk ? here.queries(p.q.codes)
                                                           : here.gradients(p.dout.codes);
    constexpr auto kCodes = kGradient == Gradient::dv ? arch::Bytes::u8 : arch::Bytes::s8;
    add_product<kCodes>(right, scale, channel, shared, result);
  }

  __device__ void add_values(const Pair& here, Fragment<float>& x, const float (&scale)[2]) {
    for_elements(x, [&](float& y, int, int row, int col) {
      shared.weights[(kByQuery ? row : col) * kWeightLine + (kByQuery ? col : row)] = y;
    });
    const Rows<float> right = kGradient == Gradient::dq   ? here.keys(p.k.values)
                              : kGradient == Gradient::dk ? here.queries(p.q.values)
                                                          : here.gradients(p.dout.values);
    const int poisoned = kGradient == Gradient::dq   ? p.k.poisoned[here.k_block()]
                         : kGradient == Gradient::dk ? p.q.poisoned[here.q_block()]
                                                     : p.dout.poisoned[here.q_block()];
    add_product(right, poisoned != 0, scale, channel, shared, result, [&](int line, int step) {
      const int row = kByQuery ? line : step, col = kByQuery ? step : line;
      return col >= shared.begin[row] && col < shared.end[row];
    });
  }

  /// The codes are of Q without the mean of its tile: result += (Σ over queries of dS)·mean.
  __device__ void add_query_mean(const Pair& here, Fragment<float>& x) {
    const Position at;
#pragma unroll
    for (int b = 0; b < 4; ++b)
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        const float sum = sum_lanes(x[b][e] + x[b][2 + e], 4, 16);
        if (at.g == 0) shared.part[at.warp_row][at.col(b, e)] = sum;
      }
    __syncthreads();
    const float* mean = p.turned_mean + here.q_block() * p.d;
#pragma unroll
    for (int part = 0; part < kResultChannels / kChannels; ++part)
      for_elements(result[part], [&](float& y, int, int line, int col) {
        const int c = channel + part * kChannels + col;
        const float sum = (shared.part[0][line] + shared.part[1][line]) +
                          (shared.part[2][line] + shared.part[3][line]);
        if (c < p.d) y += sum * mean[c];
      });
    __syncthreads();
  }

  /// dS·K = dS·(K - mean) + rowsum(dS)·mean. The row sum is zero for whole rows, exactly dLSE when
  /// that is given, and known only as the sum itself when the call sees part of the keys. What
  /// a cap takes from dS comes off.
  __device__ void find_row_sums(float (&sum)[2]) {
    const Position at;
    if (p.partial_kv || p.sums_what_cap_takes) {
      double* part = reinterpret_cast<double*>(shared.staging);  // [2][kBlock]
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        const double mine = sum_lanes(row_sum[r], 1, 2);
        if (at.t == 0) part[at.warp_col * kBlock + at.row(r)] = mine;
      }
      __syncthreads();
#pragma unroll
      for (int r = 0; r < 2; ++r)
        sum[r] = static_cast<float>(part[at.row(r)] + part[kBlock + at.row(r)]);
      if (p.partial_kv) return;
    }
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const int i = line0 + at.row(r);
      const float taken = p.sums_what_cap_takes ? sum[r] : 0.0f;
      sum[r] = 0.0f - taken;
      if (p.dlse.data != nullptr && i < s.nq &&
          p.lse2[own_head * p.tq + s.q_first + i] != -INFINITY)
        sum[r] = *tile::stat_of(p.dlse, s, own_head, s.q_begin + i) - taken;
    }
  }

  /// Where the result waits to be turned back, or null.
  __device__ float* turned_rows() const {
    return kGradient == Gradient::dq ? p.dq_rows : kGradient == Gradient::dk ? p.dk_rows : nullptr;
  }

  __device__ void finish() {
    float sum[2] = {};
    const float* mean = nullptr;
    if (kGradient == Gradient::dq && p.dq_mean != nullptr) {
      find_row_sums(sum);
      mean = p.dq_mean + (static_cast<int64_t>(s.index) * p.hk + own_head / p.group) * p.d;
    }
    if (float* rows = turned_rows(); rows != nullptr) {
      const int64_t first =
          own_head * (kByQuery ? p.tq : p.tk) + (kByQuery ? s.q_first : s.k_first) + line0;
#pragma unroll
      for (int part = 0; part < kResultChannels / kChannels; ++part)
        for_elements(result[part], [&](float& y, int r, int line, int col) {
          const int c = channel + part * kChannels + col;
          if (line0 + line >= lines || c >= p.d) return;
          rows[(first + line) * p.d + c] = y;
          if (mean != nullptr && c == 0) p.row_sum[first + line] = sum[r];
        });
      return;
    }
    const Strided& to = kGradient == Gradient::dq ? p.dq : kGradient == Gradient::dk ? p.dk : p.dv;
    const float factor = kGradient == Gradient::dv ? 1.0f : p.scale;
#pragma unroll
    for (int part = 0; part < kResultChannels / kChannels; ++part)
      for_elements(result[part], [&](float& y, int r, int line, int col) {
        const int c = channel + part * kChannels + col;
        if (line0 + line >= lines || c >= channels(p)) return;
        const float value = mean == nullptr ? y : y + sum[r] * mean[c];
        const int64_t token = (kByQuery ? s.q_begin : s.k_begin) + line0 + line;
        write(p.batch.dtype, to, tile::offset_of(to, s, own_head, token) + c, factor * value);
      });
  }
};

template <Gradient kGradient>
__global__ void __launch_bounds__(kThreads, 2)
    gradient_kernel(const __grid_constant__ BackwardParams p) {
  __shared__ Shared shared;
  if (threadIdx.x == 0)
    shared.sequence = sequence_of_block(p.batch.seq, blockIdx.x % Block<kGradient>::blocks(p),
                                        Block<kGradient>::kByQuery);
  __syncthreads();
  Block<kGradient> b(p, shared);
  const int first_head = Block<kGradient>::kByQuery ? b.own_head : b.own_head * p.group,
            heads = Block<kGradient>::kByQuery ? 1 : p.group;
  for (int head = first_head; head < first_head + heads; ++head) {
    const tile::Walk walk = b.walk(head);
    for (int step = 0; step < walk.steps; ++step) {
      const int first = walk.tile(step) * b.tile_steps;
      if (b.is_listed(head, first)) b.visit(head, first);
    }
  }
  b.finish();
}

template <Gradient kGradient>
void run(const BackwardParams& p, int heads, cudaStream_t stream) {
  const int64_t blocks = kGradient == Gradient::dq ? p.batch.q_blocks : p.batch.k_blocks;
  launch(gradient_kernel<kGradient>,
         dim3(static_cast<unsigned>(blocks * heads),
              static_cast<unsigned>((Block<kGradient>::channels(p) + kResultChannels - 1) /
                                    kResultChannels)),
         kThreads, 0, p, stream);
}

}  // namespace

void launch_backward(const BackwardParams& p, cudaStream_t stream) {
  run<Gradient::dv>(p, p.hk, stream);
  run<Gradient::dk>(p, p.hk, stream);
  TurnBackJob turn{};
  turn.batch = p.batch, turn.d = p.d, turn.factor = p.scale;
  turn.heads = p.hk, turn.group = 1, turn.tokens = p.tk;
  turn.rows = p.dk_rows, turn.to = p.dk;
  if (p.dk_rows != nullptr) launch_turn_back(turn, stream);
  run<Gradient::dq>(p, p.h, stream);
  turn.queries = true, turn.heads = p.h, turn.group = p.group, turn.tokens = p.tq;
  turn.row_sum = p.row_sum, turn.mean = p.dq_mean;
  turn.rows = p.dq_rows, turn.to = p.dq;
  if (p.dq_rows != nullptr) launch_turn_back(turn, stream);
}

}  // namespace sagebwd::cuda::plain
