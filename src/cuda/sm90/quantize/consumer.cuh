// SPDX-License-Identifier: Apache-2.0
// The consumers: codes of a block of tokens, from the largest magnitude of each token or of all.
//
//   rows in shared memory → product → values - mean → scales → codes → rows in the workspace and in
//   the caller's memory; those of V also transposed, through shared memory
#pragma once

#include "cuda/sm90/codes.cuh"
#include "cuda/sm90/quantize/means.cuh"
#include "cuda/tuned/exact_scale.cuh"
#include "cuda/tuned/transposed.cuh"
#include "sagebwd/codes.h"

namespace sagebwd::cuda::sm90::codes {

using tuned::exact_scale, tuned::kZeroScale, tuned::word_at;

template <typename T, int D, KeyScales kScales>
struct Consumer {
  using S = Shape<D>;
  using Plan = SharedPlan<T, D>;
  using Block = Values<T, D>;
  static constexpr bool kTokens = kScales == KeyScales::token;

  const CodesJob& job;
  Plan& shared;
  uint32_t memory;  // the place of the shared memory (arch::place_of)
  Ring<kStages> stage{0};
  Ring<kSlots> slot{0};

  __device__ const Piece& piece() const { return shared.piece[slot.place()]; }
  __device__ const float* mean() const { return shared.mean[slot.place()]; }
  __device__ uint32_t stage_place() const {
    return memory + arch::places(offsetof(Plan, stage)) +
           static_cast<uint32_t>(stage.place()) * arch::places(sizeof(typename Plan::Stage));
  }

  __device__ void wait() const { wait_for(shared.full, stage); }
  __device__ void wait_for_mean() const { wait_for(shared.mean_full, slot); }
  /// The stage may be filled again.
  __device__ void release() const {
    __syncwarp();
    if (arch::thread_index() % 32 == 0) arrive_at(shared.empty, stage);
  }
  __device__ void advance() { stage.advance(), slot.advance(); }

  __device__ void run() {
    for (;; advance()) {
      wait();
      const Kind kind = piece().kind;
      if (kind == Kind::none) return;
      if constexpr (!kTokens)
        if (kind == Kind::k_mean || kind == Kind::v_mean) {
          span();
          continue;
        }
      Block b;
      const uint32_t matrices = memory + arch::places(offsetof(Plan, matrices));
      if (kind != Kind::values && job.rotation > 0)
        b.template multiply<true>(stage_place(), matrices);
      else
        b.template multiply<false>(stage_place(), matrices);
      if (kind != Kind::values) release();
      wait_for_mean();
      if (kind == Kind::keys)
        keys(b);
      else if (kind == Kind::values)
        values(b);
      else
        queries(b);
    }
  }

  /// Blocks of a mean, up to the last of the span.
  __device__ void span() {
    RunMean<T, D> mean{job, shared.means};
    while (true) {
      if (job.seq.documents != nullptr && piece().left < kBlock) clear_tokens();
      float few[32];
      mean.add_tokens(few, stage_place(), memory + arch::places(offsetof(Plan, token_rows)));
      release();
      mean.add(few);
      if (piece().run_ends) mean.finish_run(piece());
      wait_for_mean();  // it needs none, but every phase of a barrier is waited for
      if (!piece().goes_on) return;
      advance();
      wait();
    }
  }
  /// Zeroes tokens behind the end of a document, where others have been copied.
  __device__ void clear_tokens() const {
    constexpr uint32_t kChunks = D / 8;
    for (uint32_t i = arch::thread_index(); i < kBlock * kChunks; i += S::kConsumers) {
      const uint32_t token = i / kChunks, chunk = i % kChunks;
      if (static_cast<int>(token) < piece().left) continue;
      *reinterpret_cast<uint4*>(shared.stage[stage.place()].panel[chunk / 8] +
                                arch::swizzled<kRowBytes>(token * kRowBytes + chunk % 8 * 16)) =
          make_uint4(0, 0, 0, 0);
    }
    arch::shared_writes_done();
    meet<D>();
  }

  __device__ bool saves() const { return job.saved.q8 != nullptr; }

  /// The largest number of all consumers, as bits: their order is that of magnitudes, NaN on top.
  __device__ float share_top(int round, float top) const {
    const uint32_t most = __reduce_max_sync(0xffffffffu, __float_as_uint(top));
    const uint32_t thread = arch::thread_index();
    if (thread % 32 == 0) shared.top[slot.place()][round][thread / 32] = most;
    meet<D>();
    const auto* tops = reinterpret_cast<const uint4*>(shared.top[slot.place()][round]);
    uint32_t all = 0;
#pragma unroll
    for (int i = 0; i < S::kWarps / 4; ++i) {
      const uint4 four = tops[i];
      all = max(all, max(max(four.x, four.y), max(four.z, four.w)));
    }
    return __uint_as_float(all);
  }
  /// What a block of K or V has: the largest magnitude of its tokens without those that hold NaN or
  /// Inf, and whether there are such.
  struct Largest {
    float top;
    bool poisoned;
  };
  __device__ Largest largest(float top) const {
    const float most = share_top(0, top);
    if (numerics::is_finite(most)) return {most, false};
    return {share_top(1, numerics::is_finite(top) ? top : 0.0f), true};
  }

  /// Calls put(i, panel, the lane's 16 codes) for each row i of the thread. `inverse`: the factor
  /// of the token that this lane owns; 0: its codes are 0.
  template <typename Put>
  __device__ __forceinline__ void make_codes(Block& b, float inverse, Put put) const {
#pragma unroll
    for (int i = 0; i < S::kRows; ++i) {
      const float factor = __shfl_sync(0xffffffffu, inverse, i, 4);
#pragma unroll
      for (int panel = 0; panel < S::kPanels; ++panel) put(i, panel, b.codes(i, panel, factor));
    }
  }
  /// In the second-level cache codes are the first to make room: what must stay are K and V between
  /// their mean and their codes.
  __device__ static void write_once(int8_t* to, uint4 words) {
    __stcs(reinterpret_cast<uint4*>(to), words);
  }

  /// Writes codes of Q or K.
  __device__ __forceinline__ void write_codes(Block& b, float inverse, int8_t* rows,
                                              int8_t* saved) const {
    const Place<D>& place = b.place;
    const uint32_t at = place.first_row() * D + place.channel(0);
    if (rows != nullptr) rows += piece().row * D + at;
    if (saved != nullptr) saved += piece().saved_row * D + at;
    const int left = piece().left - static_cast<int>(place.first_row());
    make_codes(b, inverse, [&](int i, int panel, uint4 words) {
      const int row = i / 2 * 64 + i % 2 * 8, offset = row * D + panel * 64;
      if (rows != nullptr) write_once(rows + offset, words);
      if (saved != nullptr && row < left) write_once(saved + offset, words);
    });
  }

  /// Where a number of a token is among those of its block, in the order of tile::permuted.
  __device__ static uint32_t permuted_place(uint32_t row) {
    return (row & ~15u) + static_cast<uint32_t>(tile::place_of(static_cast<int>(row % 16)));
  }

  /// Keys with a scale each.
  __device__ void lone_keys(Block& b) const {
    const Place<D>& place = b.place;
    b.centre(mean(), job.rotation > 0 ? numerics::rotation_unit(D) : 1.0f);
    const uint32_t row = place.own_row();
    const bool real = static_cast<int>(row) < piece().left;
    const float found = b.own_top(), scale = numerics::key_scale_of(real ? found : 0.0f);
    const bool poisoned = scale != scale;
    const bool any_poisoned = share_top(0, poisoned ? scale : 0.0f) != 0.0f;
    if (job.numbers != nullptr) {
      KeyNumbers& to = job.numbers[piece().row / kBlock];
      if (arch::thread_index() == 0) to.scales.k_poisoned = any_poisoned;
      if (place.owns())
        to.k[permuted_place(row)] = poisoned ? kPoisonedScale : scale == 0.0f ? kZeroScale : scale;
    }
    if (place.owns() && saves() && real) job.saved.k_scale[piece().saved_row + row] = scale;
    write_codes(b, numerics::inverse_of(scale), job.k8, saves() ? job.saved.k8 : nullptr);
  }

  __device__ void keys(Block& b) const {
    if constexpr (kTokens) return lone_keys(b);
    const Place<D>& place = b.place;
    const float unit = job.rotation > 0 ? numerics::rotation_unit(D) : 1.0f;
    b.subtract(mean());
    const uint32_t row = place.own_row();
    const bool real = static_cast<int>(row) < piece().left;
    const float found = b.own_top() * unit, top = real ? found : 0.0f;
    const Largest of = largest(top);
    const float common = numerics::scale_of(of.top), exact = exact_scale(common);
    const bool poisoned = !numerics::is_finite(top);
    if (arch::thread_index() == 0) {
      if (job.block_scales != nullptr) {
        BlockScales& to = job.block_scales[piece().row / kBlock];
        to.k = exact, to.k_poisoned = of.poisoned;
      }
      if (saves() && real)
        job.saved.k_scale[piece().head * job.saved.key_blocks + piece().block] = common;
    }
    // The forward reads scales of single keys only in blocks that have a poisoned one.
    if (of.poisoned && job.k_scale != nullptr && place.owns())
      job.k_scale[piece().row + row] = {poisoned ? __int_as_float(0x7fffffff) : exact,
                                        -tile::kMagicFloat * exact};
    write_codes(b, real && !poisoned ? numerics::inverse_of(common) * unit : 0.0f, job.k8,
                saves() ? job.saved.k8 : nullptr);
    // In the caller's memory the first code of a poisoned key says so; the others are 0.
    __syncwarp();
    if (poisoned && saves() && place.owns())
      job.saved.k8[(piece().saved_row + row) * D] = kPoisonedCode;
  }

  __device__ void values(Block& b) const {
    const Place<D>& place = b.place;
    if constexpr (!kTokens) b.subtract(mean());
    const uint32_t row = place.own_row();
    const bool real = static_cast<int>(row) < piece().left;
    const float found = b.own_top(), top = real ? found : 0.0f;
    const Largest of = largest(top);  // also, nobody reads the stage any more
    const float most = kTokens ? numerics::lone_value_scale(of.top) : numerics::scale_of(of.top);
    float scale = kTokens ? numerics::lone_value_scale(top) : numerics::scale_of(top);
    if (!kTokens && numerics::is_finite(top)) scale = numerics::value_scale(scale, most);
    if (kTokens && job.numbers != nullptr) {
      KeyNumbers& to = job.numbers[piece().row / kBlock];
      const bool poisoned = scale != scale;
      if (arch::thread_index() == 0) to.scales.v = most, to.scales.v_poisoned = of.poisoned;
      if (place.owns()) {
        const uint32_t at = permuted_place(row);
        to.v[at] = poisoned ? 0.0f : scale;
        to.share[at] = poisoned ? kPoisonedShare
                                : __half_as_ushort(__float2half_rn(
                                      value_share(scale, arch::reciprocal_approx(most))));
      }
    }
    if (job.block_scales != nullptr && arch::thread_index() == 0) {
      BlockScales& to = job.block_scales[piece().row / kBlock];
      to.v = most, to.v_poisoned = of.poisoned;
    }
    if (place.owns()) {
      if (job.v_share != nullptr) {
        const int64_t token = piece().row + row;
        const float share = most == 0.0f ? 0.0f : __fdividef(scale, most);
        // Poison shows in the scale: the share has none where all other tokens are zero.
        job.v_share[(token & ~int64_t{15}) + tile::place_of(static_cast<int>(token % 16))] =
            scale != scale ? kPoisonedShare : __half_as_ushort(__float2half_rn(share));
      }
      if (saves() && real) job.saved.v_scale[piece().saved_row + row] = scale;
    }
    // Codes take the place of the tokens.
    auto* transposed = reinterpret_cast<uint32_t*>(&shared.stage[stage.place()]);
    static_assert(kBlock * D <= sizeof(typename Plan::Stage));
    int8_t* saved = saves() ? job.saved.v8 + piece().saved_row * D + place.channel(0) : nullptr;
    const int left = piece().left;
    make_codes(b, real ? numerics::inverse_of(scale) : 0.0f, [&](int i, int panel, uint4 words) {
      const uint32_t at = place.row(i);
      *reinterpret_cast<uint4*>(transposed + word_at<D>(at, place.channel(panel) / 4)) = words;
      if (saved != nullptr && static_cast<int>(at) < left)
        write_once(saved + at * D + panel * 64, words);
    });
    if (job.v8t != nullptr) {
      meet<D>();
      tuned::write_transposed<D, false>(job.v8t, piece().row, transposed, arch::thread_index());
    }
    arch::shared_writes_done();
    release();
  }

  __device__ void queries(Block& b) const {
    const Place<D>& place = b.place;
    const bool rotates = job.rotation > 0;
    const float unit = rotates ? numerics::rotation_unit(D) : 1.0f;
    // Both the query and the mean were rotated without the factor 1/√D.
    const float dot = kTokens ? 0.0f : b.dot(mean()) * (rotates ? 1.0f / D : 1.0f);
    const uint32_t row = place.own_row();
    const bool real = static_cast<int>(row) < piece().left;
    const float top = b.own_top() * unit, scale = numerics::scale_of(real ? top : 0.0f),
                inverse = real ? numerics::inverse_of(scale) * unit : 0.0f;
    // The forward adds this number to LSE and the backward subtracts it again. Both need the same
    // bits, so the product is rounded by itself and not as part of a multiply-add.
    const float mean_logit = __fmul_rn(job.logit_scale, dot);
    if (place.owns()) {
      if (job.logit_factor != nullptr) {
        // A query of zeros has logits 0 with any factor. A positive one keeps masked logits at
        // -inf, and next to a small one the start of the integer sums vanishes.
        const float factor = scale * (job.logit_scale * numerics::kLog2e);
        job.logit_factor[piece().row + row] = factor == 0.0f ? kZeroScale : factor;
        if constexpr (!kTokens) job.mean_logit[piece().row + row] = mean_logit;
      }
      if (saves() && real) {
        job.saved.q_scale[piece().saved_row + row] = scale;
        if constexpr (!kTokens) job.saved.mean_logit[piece().saved_row + row] = mean_logit;
      }
    }
    write_codes(b, inverse, job.q8, saves() ? job.saved.q8 : nullptr);
  }
};

}  // namespace sagebwd::cuda::sm90::codes
