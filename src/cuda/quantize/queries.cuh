// SPDX-License-Identifier: Apache-2.0
// The pieces of work that are queries: Q, and in the backward dO and O.
#pragma once

#include "cuda/quantize/query_numbers.cuh"
#include "cuda/quantize/worker.cuh"

namespace sagebwd::cuda {

template <typename T, int D, bool kBackward, Scheme kScheme, Reader kReader>
struct QueryWorker : Worker<T, D, kBackward, kScheme, kReader> {
  using Base = Worker<T, D, kBackward, kScheme, kReader>;
  using Base::job, Base::item, Base::next, Base::shared, Base::start_rest, Base::wait_for_stage,
      Base::row, Base::reads_codes, Base::saves_codes, Base::saved_row, Base::with_saved,
      Base::load_mean, Base::read_v_mean, Base::value_scale, Base::wait_for_value_scale,
      Base::kSteps, Base::kStagesGradients;
  using typename Base::Block, typename Base::Targets;

  __device__ void queries(Block& b) const {
    const int64_t own = b.token0() + b.own();
    const Targets to{.rows = job.q8, .transpose = kBackward};
    float mean_logit;
    float lse = -INFINITY, dlse = 0.0f;
    const auto load_statistics = [&] {
      if (!b.own_is_real()) return;
      const int64_t token = item.s.q_begin + item.first + b.first_token() + b.own();
      lse = *tile::stat_of(job.lse, item.s, item.head, token);
      if (job.dlse.data != nullptr) dlse = *tile::stat_of(job.dlse, item.s, item.head, token);
    };
    constexpr bool kEarly = kReader == Reader::sm90;  // there are registers to keep them in
    uint2 value_top = make_uint2(0, 0);
    if constexpr (kBackward) clear_sums(b.row0);
    if constexpr (kEarly) load_statistics();
    if constexpr (kReader == Reader::sm90) value_top = value_scale(item.kv_head);
    if (reads_codes()) {
      const int64_t saved = saved_row(b, true);
      typename Block::Words codes;
      b.get_codes(codes);
      b.scale = b.own_is_real() ? job.saved.q_scale[saved + b.own()] : 0.0f;
      mean_logit = b.own_is_real() ? job.saved.mean_logit[saved + b.own()] : 0.0f;
      b.put_all(to, codes);
    } else {
      b.flip(shared.signs);
      load_mean(b, job.k_mean, item.kv_head);
      const float dot = dots(b, [&](int, int part, float(&y)[8]) {
#pragma unroll
        for (int e = 0; e < 8; ++e) y[e] = b.mean[part][e];
      });
      b.template make<false>();
      if (job.rotation > 0) b.rotate(job.rotation);
      this->template measure<Values::made>(b, job.q_tokens);
      // The forward adds this number to LSE and the backward subtracts it again. Both need the same
      // bits, so the product is rounded by itself and not as part of a multiply-add.
      mean_logit = __fmul_rn(job.logit_scale, dot);
      const int64_t saved = saved_row(b, true);
      if (saves_codes() && b.owns() && b.own_is_real()) {
        job.saved.q_scale[saved + b.own()] = b.scale;
        job.saved.mean_logit[saved + b.own()] = mean_logit;
      }
      b.template write_codes<Values::made>(with_saved(to, job.saved.q8, saved));
    }
    const float logit_factor = b.scale * (job.logit_scale * numerics::kLog2e);
    if constexpr (!kBackward) {
      if (b.owns()) {
        // A query of zeros has logits 0 with any factor. A positive one keeps masked logits at
        // -inf, and next to a small one the start of the integer sums vanishes.
        job.logit_factor[own] = logit_factor == 0.0f ? kZeroScale : logit_factor;
        job.mean_logit[own] = mean_logit;
      }
    } else {
      __syncthreads();
      b.template write_transposed<false>(job.q8t);
      // Codes of dO take the place of these. In write_stats all threads meet before that.
      if (kReader != Reader::sm90) __syncthreads();
      if constexpr (!kEarly) load_statistics();
      if constexpr (kReader == Reader::sm80)
        if (job.capped) {
          if (b.owns()) job.mean_logit[own] = mean_logit;
          mean_logit = 0.0f;
        }
      // P = 0 for queries without keys and after the end.
      const float lse2 = lse == -INFINITY ? INFINITY : (lse - mean_logit) * numerics::kLog2e;
      douts(b, own, logit_factor == 0.0f ? kZeroScale : logit_factor, lse2, dlse, value_top);
    }
  }

  /// dO, after Q. A query needs numbers of both, and the lane that owns it has them.
  __device__ void douts(Block& b, int64_t own, float logit_factor, float lse2, float dlse,
                        uint2 value_top) const {
    typename Block::Chunks out;
    if constexpr (kStagesGradients) {
      wait_for_stage();
      b.take(b.chunk, shared.stage[1]);
    } else {
      b.load(b.chunk, row(job.dout, b, true), job.dout, job.d);
      b.load(out, row(job.o, b, true), job.o, job.d);
    }
    if (job.do16 != nullptr) b.write_loaded(job.do16);
    this->template measure<Values::loaded>(b, job.q_tokens);
    // Codes of V lack its mean: dP made from them lacks dO·mean(V), and so must D.
    if (reads_codes())
      read_v_mean(b, item.kv_head);
    else
      load_mean(b, job.v_mean, item.kv_head);
    float delta = dots(b, [&](int step, int part, float(&y)[8]) {
      if constexpr (kStagesGradients)
        Block::staged(shared.stage[2], step, part).unpack(y);
      else
        out[part][step].unpack(y);
#pragma unroll
      for (int e = 0; e < 8; ++e) y[e] -= b.mean[part][e];
    });
    start_rest();
    delta = lse2 == INFINITY ? 0.0f : delta - dlse;
    if constexpr (kReader == Reader::sm90) {
      write_stats(b, own, logit_factor, lse2, delta, dlse, value_top);
    } else if (b.owns()) {
      // A query with dO = 0 still has dS if dLSE is given, so its φ is tiny instead of 0.
      const float phi = b.scale == 0.0f ? 0x1p-90f : b.scale;
      const float slope = logit_factor / phi;
      job.row[own] = {logit_factor, lse2};
      job.exponent[own] = {logit_factor, lse2 - log2f(phi)};
      job.gradient[own] = {slope, -delta * slope};
    }
    b.template write_codes<Values::loaded>({.transpose = true});
    __syncthreads();
    b.template write_transposed<false>(job.do8t);
  }

  /// What sm90's backward knows of the queries (QueryStats).
  __device__ void write_stats(Block& b, int64_t own, float logit_factor, float lse2, float delta,
                              float dlse, uint2 value_top) const {
    const float norm =
        sqrtf(dots(b, [&](int step, int part, float(&y)[8]) { b.chunk[part][step].unpack(y); }));
    const float most =
        QueryNumbers::most_per_norm<D>(wait_for_value_scale(value_top, item.kv_head));
    QueryNumbers query{logit_factor, lse2, delta, dlse, norm, b.scale};
    QueryNumbers::Largest of;
    constexpr int kTile = backward_queries(D);
    of.phi = __uint_as_float(b.share_top(0, query.phi(), kTile).mine);
    if (job.dlse.data != nullptr) {
      query.raise_scale(of.phi);
      b.scale = query.scale;
      b.share_inverses();
    }
    const float ratio = query.ratio(), bound = query.bound(ratio, most);
    of.bound = __uint_as_float(b.share_top(1, QueryNumbers::finite(bound), kTile).mine);
    QueryStats& stats = job.stats[b.row0 / kSlab + b.slot() * kSteps / kSlab];
    if (b.owns())
      query.write(stats, static_cast<int>(own % kSlab), job.dq_lift[own], job.row[own], ratio,
                  bound, of);
    if (threadIdx.x % (kRowThreads / 2) == 0) QueryNumbers::write_units(stats, of);
    __syncthreads();  // share_top's memory is free again
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
    const int64_t vectors = job.dq_halves ? D / 8 : D / 4;  // of a row
    auto* to = static_cast<uint4*>(job.dq_sum) + row0 * vectors + threadIdx.x;
    for (int i = 0; i < kBlock * static_cast<int>(vectors) / kRowThreads; ++i)
      to[i * kRowThreads] = make_uint4(0, 0, 0, 0);
  }
};

}  // namespace sagebwd::cuda
