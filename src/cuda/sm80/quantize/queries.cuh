// SPDX-License-Identifier: Apache-2.0
// The pieces of work that are queries: Q, and in the backward dO and O.
#pragma once

#include "cuda/arch/mma_sync.cuh"
#include "cuda/sm80/quantize/worker.cuh"
#include "numerics/octaves.h"

namespace sagebwd::cuda::sm80 {

template <typename T, int D, bool kBackward, bool kPaper>
struct QueryWorker : Worker<T, D, kBackward, kPaper> {
  using Base = Worker<T, D, kBackward, kPaper>;
  using Base::job, Base::item, Base::shared, Base::row, Base::reads_codes, Base::saves_codes,
      Base::saved_row, Base::with_saved, Base::load_k_mean, Base::kSteps;
  using typename Base::Block, typename Base::Targets;

  __device__ void queries(Block& b) const {
    const int64_t own = b.token0() + b.own();
    const Targets to{.rows = job.q8, .transpose = kBackward};
    float mean_logit = 0.0f;  // `paper`
    if constexpr (kBackward) clear_sums(b.row0);
    if (reads_codes()) {
      const int64_t saved = saved_row(b, true);
      typename Block::Words codes;
      b.get_codes(codes);
      b.scale = b.own_is_real() ? job.saved.q_scale[saved + b.own()] : 0.0f;
      b.put_all(to, codes);
    } else {
      b.flip(shared.signs);
      if constexpr (kPaper) {
        load_k_mean(b, item.kv_head);
        const float dot = dots(b, [&](int, int part, float(&y)[8]) {
#pragma unroll
          for (int e = 0; e < 8; ++e) y[e] = b.mean[part][e];
        });
        // The forward adds this number to LSE and the backward subtracts it again. Both need the
        // same bits, so the product is rounded by itself and not as part of a multiply-add.
        mean_logit = __fmul_rn(job.logit_scale, dot);
      }
      b.template make<false>();
      if (job.rotation > 0) b.rotate(job.rotation);
      this->template measure<Values::made>(b, job.q_tokens);
      const int64_t saved = saved_row(b, true);
      if (saves_codes() && b.owns() && b.own_is_real())
        job.saved.q_scale[saved + b.own()] = b.scale;
      b.template write_codes<Values::made>(with_saved(to, job.saved.q8, saved));
    }
    const float logit_factor = b.scale * (job.logit_scale * numerics::kLog2e);
    if constexpr (!kBackward) {
      if (b.owns()) {
        // A query of zeros has logits 0 with any factor. A positive one keeps masked logits at
        // -inf, and next to a small one the start of the integer sums vanishes.
        job.logit_factor[own] = logit_factor == 0.0f ? kZeroScale : logit_factor;
        if constexpr (kPaper) job.mean_logit[own] = mean_logit;
      }
    } else {
      __syncthreads();
      b.template write_transposed<false>(job.q8t);
      if constexpr (kPaper) __syncthreads();  // codes of dO take the place of these
      float lse = -INFINITY, dlse = 0.0f;
      if (b.own_is_real()) {
        const int64_t token = item.s.q_begin + item.first + b.first_token() + b.own();
        lse = *tile::stat_of(job.lse, item.s, item.head, token);
        if (job.dlse.data != nullptr) dlse = *tile::stat_of(job.dlse, item.s, item.head, token);
      }
      // P = 0 for queries without keys and after the end.
      const float lse2 = lse == -INFINITY ? INFINITY : (lse - mean_logit) * numerics::kLog2e;
      douts(b, own, logit_factor == 0.0f ? kZeroScale : logit_factor, lse2, dlse);
    }
  }

  /// dO, after Q. A query needs numbers of both, and the lane that owns it has them.
  __device__ void douts(Block& b, int64_t own, float logit_factor, float lse2, float dlse) const {
    typename Block::Chunks out;
    b.load(b.chunk, row(job.dout, b, true), job.dout, job.d);
    b.load(out, row(job.o, b, true), job.o, job.d);
    if (job.do16 != nullptr) b.write_loaded(job.do16);
    this->template measure<Values::loaded>(b, job.q_tokens);
    float delta = dots(b, [&](int step, int part, float(&y)[8]) { out[part][step].unpack(y); });
    delta = lse2 == INFINITY ? 0.0f : delta - dlse;
    // A query with dO = 0 still has dS if dLSE is given, so its φ is tiny instead of 0.
    const float phi = b.scale == 0.0f ? 0x1p-90f : b.scale, slope = logit_factor / phi;
    if (b.owns()) {
      job.row[own] = {logit_factor, lse2};
      if constexpr (kPaper) job.exponent[own] = {logit_factor, lse2 - log2f(phi)};
      if (kPaper || !job.folds_v) job.gradient[own] = {slope, -delta * slope};
    }
    if constexpr (!kPaper) {
      b.keep_chunks();
      octave_exponents(b, own, logit_factor, lse2);
      if (job.folds_v) octave_gradients(b, slope, delta);
      __syncthreads();  // codes of dO take the place of those of Q
    }
    b.template write_codes<Values::loaded>({.transpose = true});
    __syncthreads();
    b.template write_transposed<false>(job.do8t);
  }

  /// Logits have an addend that the keys of an octave share, so a query has an exponent for each
  /// octave; or that addend, where a cap comes between. Codes of Q are in shared memory, and the
  /// thread has put its own.
  __device__ void octave_exponents(const Block& b, int64_t own, float logit_factor,
                                   float lse2) const {
    typename Block::Words codes;
    b.take_back(codes);
    // As in douts.
    const float phi = b.scale == 0.0f ? 0x1p-90f : b.scale, exponent = lse2 - log2f(phi);
    const int64_t queries = job.h * job.tq;
    const int octaves = numerics::octaves_of(item.s.nk);
#pragma unroll 1
    for (int octave = 0; octave < octaves; ++octave) {
      const LaneCentre<D> centre(
          job.centres,
          job.centres.row(item.kv_head, item.s.k_pad / kBlock, numerics::first_block_of(octave)),
          b.channel(0), job.d);
      int dot[kSteps];
#pragma unroll
      for (int step = 0; step < kSteps; ++step) {
        dot[step] = 0;
#pragma unroll
        for (int part = 0; part < Block::kParts; ++part) {
          const uint2 q = codes[part][step], k = centre.codes[part];
          dot[step] = __dp4a(static_cast<int>(q.x), static_cast<int>(k.x), dot[step]);
          dot[step] = __dp4a(static_cast<int>(q.y), static_cast<int>(k.y), dot[step]);
        }
#pragma unroll
        for (int lanes = 1; lanes < Block::kLanes; lanes *= 2)
          dot[step] += __shfl_xor_sync(0xffffffffu, dot[step], lanes);
      }
      const float sum = static_cast<float>(b.own() == 0 ? dot[0] : dot[1]);
      static_assert(kSteps == 2);
      const float logit = __fmul_rn(__fmul_rn(sum, centre.scale), logit_factor);
      if (!b.owns()) continue;
      if (job.centre_logit != nullptr)
        job.centre_logit[octave * queries + own] = logit;
      else
        job.exponent[octave * queries + own] = {logit_factor, exponent - logit};
    }
    if (b.owns() && job.centre_logit != nullptr) job.exponent[own] = {logit_factor, exponent};
  }

  /// The same of dP, to which the centre of an octave's values adds dO·centre. Those of eight
  /// octaves are the columns of one product: the contraction takes the channels in the order in
  /// which lanes have them, and the thread's tokens are rows g and g + 8.
  __device__ void octave_gradients(const Block& b, float slope, float delta) const {
    static_assert(kSteps == 2 && Block::kLanes == 4);
    const auto row_of = [&](int octave) {
      return job.value_centres.row(item.kv_head, item.s.k_pad / kBlock,
                                   numerics::first_block_of(octave));
    };
    const int octaves = numerics::octaves_of(item.s.nk), lane = static_cast<int>(b.thread % 32);
#pragma unroll 1
    for (int first = 0; first < octaves; first += 8) {
      const LaneCentre<D> centre(job.value_centres, row_of(min(first + lane / 4, octaves - 1)),
                                 b.channel(0), job.d);
      float dot[4] = {};
#pragma unroll
      for (int part = 0; part < Block::kParts; ++part) {
        const uint4 low = b.chunk[part][0].bits, high = b.chunk[part][1].bits;
        const uint2 m[2] = {tile::widened<T>(centre.codes[part].x),
                            tile::widened<T>(centre.codes[part].y)};
        const uint32_t first_half[4] = {low.x, high.x, low.y, high.y},
                       second_half[4] = {low.z, high.z, low.w, high.w};
        arch::mma_16<T>(dot, first_half, m[0].x, m[0].y);
        arch::mma_16<T>(dot, second_half, m[1].x, m[1].y);
      }
      const float scale[2] = {__shfl_sync(0xffffffffu, centre.scale, lane % 4 * 8),
                              __shfl_sync(0xffffffffu, centre.scale, lane % 4 * 8 + 4)};
#pragma unroll
      for (int step = 0; step < kSteps; ++step) {
        const float of_token = __shfl_sync(0xffffffffu, slope, step, Block::kLanes),
                    minus = __shfl_sync(0xffffffffu, delta, step, Block::kLanes);
#pragma unroll
        for (int e = 0; e < 2; ++e) {
          const int octave = first + lane % 4 * 2 + e;
          if (octave >= octaves) continue;
          const float added = scale[e] * dot[2 * step + e];
          job.gradient[octave * (job.h * job.tq) + b.token0() + step] = {
              of_token, (added - minus) * of_token};
        }
      }
    }
  }

  /// The dot product of the token that this lane owns with `other`. other(step, part, y) gives y
  /// the thread's eight channels of a part for its token `step`.
  template <typename Other>
  __device__ float dots(const Block& b, Other other) const {
    float sum[kSteps];
#pragma unroll
    for (int step = 0; step < kSteps; ++step) {
      sum[step] = 0.0f;
#pragma unroll
      for (int part = 0; part < Block::kParts; ++part) {
        float x[8], y[8];
        b.chunk[part][step].unpack(x);
        other(step, part, y);
#pragma unroll
        for (int e = 0; e < 8; ++e) sum[step] = fmaf(x[e], y[e], sum[step]);
      }
    }
    return scatter_reduce<Block::kLanes>(sum, b.member(), [](float x, float y) { return x + y; });
  }

  /// Zeroes the sums of dQ, to which the fused kernel adds.
  __device__ void clear_sums(int64_t row0) const {
    if (job.dq_sum == nullptr) return;
    constexpr int kVectors = kBlock * D / 4;
    auto* to = reinterpret_cast<uint4*>(job.dq_sum) + row0 * (D / 4) + threadIdx.x;
    for (int i = 0; i < kVectors / kRowThreads; ++i) to[i * kRowThreads] = make_uint4(0, 0, 0, 0);
  }
};

}  // namespace sagebwd::cuda::sm80
