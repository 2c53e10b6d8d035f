// SPDX-License-Identifier: Apache-2.0
// A consumer: a warpgroup with 64 of the queries.
#pragma once

#include <cmath>
#include <cstddef>
#include <cstdint>

#include "cuda/arch/wgmma.cuh"
#include "cuda/sm90/fwd/again.cuh"
#include "cuda/sm90/fwd/centres.cuh"
#include "cuda/sm90/fwd/results.cuh"
#include "cuda/sm90/fwd/rows.cuh"
#include "cuda/sm90/fwd/shared.cuh"
#include "cuda/sm90/fwd/shares.cuh"
#include "cuda/sm90/fwd/softmax.cuh"
#include "cuda/sm90/operand.cuh"
#include "numerics/octaves.h"

namespace sagebwd::cuda::sm90::fwd {

template <typename T, int D>
struct Consumer {
  using Plan = SharedPlan<D>;
  using Stage = typename Plan::Stage;
  using Slot = typename Plan::Slot;
  static constexpr int kChannels = 64;  // of a product P8·V8

  const ForwardParams& p;
  Plan& shared;
  int warpgroup;        // its number
  uint32_t warp, lane;  // warp: inside the warpgroup
  uint32_t place;       // of the shared memory, for products
  Ring<kStages> stage{0};
  Ring<kSlots> slot{0};

  __device__ int first_row() const {
    return warpgroup * 64 + static_cast<int>(warp * 16 + lane / 4);
  }

  // With 128 channels no registers are left to keep them in, and every tile reads them again.
  static constexpr bool kKeepsFactors = D == 64;
  __device__ float logit_factor_of(int r) const {
    return shared.logit_factor[slot.place()][first_row() + 8 * r];
  }

  /// The place of the stage, for products.
  __device__ uint32_t stage_at() const {
    return place + static_cast<uint32_t>(stage.place()) * arch::places(sizeof(Stage));
  }

  /// Q8 of the warpgroup.
  __device__ Operand<D> queries_at() const {
    return {place + static_cast<uint32_t>(slot.place()) * arch::places(sizeof(Slot)) +
                static_cast<uint32_t>(warpgroup) * arch::places(64 * D),
            offsetof(Plan, slot)};
  }

  /// S = Q8·K8ᵀ of the tile in the stage.
  __device__ __forceinline__ void multiply_qk(Scores& x) const {
    const Operand<D> queries = queries_at(), keys{stage_at(), offsetof(Plan, stage)};
    arch::settle(x);
    arch::wgmma_fence();
#pragma unroll
    for (int step = 0; step < D / 32; ++step)
      arch::wgmma_8(x, queries.step(step), keys.step(step), step > 0);
    arch::wgmma_commit();
    arch::wgmma_wait<0>();
    arch::settle(x);
  }

  /// Where a tile of keys meets the thread's rows.
  __device__ Corner corner(int tile) const {
    return {shared.work[slot.place()].q0 + first_row(), tile * kKeys};
  }
  /// The same, worked out here and not for several uses at once: there are no registers for that.
  __device__ __forceinline__ Corner corner_now(int tile) const {
    uint32_t row = static_cast<uint32_t>(first_row());
    arch::keep(row);
    return {shared.work[slot.place()].q0 + static_cast<int>(row), tile * kKeys};
  }
  /// Hides what the mask hides. `tile`: of keys, inside the sequence.
  __device__ void hide(Scores& x, int tile) const {
    hide_keys<kKeys>(x, band(), shared.work[slot.place()].s, corner(tile), lane);
  }
  __device__ void spread_poison(Sums<D>& sums, int tile) const {
    fwd::spread_poison<kKeys>(sums, band(), shared.work[slot.place()].s.nk, corner_now(tile),
                              keys().k, keys().v);
  }

  // The mask of the piece, and what the keys of the stage have.
  __device__ const tile::Band& band() const { return shared.band[slot.place()]; }
  __device__ const KeyNumbers& keys() const { return shared.keys[stage.place()]; }

  /// O += P8·V8 of the tile, which is free then. code_unit: what codes are worth, beside the
  /// largest scale of V unless kHasScale.
  template <bool kHasScale>
  __device__ __forceinline__ void multiply_pv(Sums<D>& sums, uint32_t (&codes)[16],
                                              const PerRow& code_unit, int tile) {
    constexpr int kParts = D / kChannels;
    const Operand<kSlab> v8t{stage_at(), offsetof(Plan, stage) + sizeof(Stage::k8)};
    PerRow unit;
    arch::settle(codes);
#pragma unroll
    for (int part = 0; part < kParts; ++part) {
      int acc[kChannels / 2];
      arch::wgmma_fence();
#pragma unroll
      for (int step = 0; step < 4; ++step)
        arch::wgmma_u8(acc, codes + 4 * step,
                       v8t.from_row(step / 2 * D + part * kChannels).step(step % 2), step > 0);
      arch::wgmma_commit();
      // Read here, and not with the scale of K: until now they would only take registers.
      const KeyNumbers::OfBlock of_block = keys().block;
#pragma unroll
      for (int r = 0; r < 2; ++r)
        if (part == 0) unit[r] = kHasScale ? code_unit[r] : code_unit[r] * of_block.v;
      arch::wgmma_wait<0>();
      arch::settle(acc);
      if (part == kParts - 1) {
        arch::settle(codes);
        if (of_block.is_poisoned()) spread_poison(sums, tile);
        release();
      }
      add_product(sums, part, acc, unit);
    }
  }

  __device__ __forceinline__ RowLogits<1> row_logits(const PerRow& logit_factor, int tile) const {
    const auto& centre = shared.centre_logit[numerics::octave_of_block(tile)];
    RowLogits<1> logits;
#pragma unroll
    for (int r = 0; r < 2; ++r)
      logits.factor[r] = kKeepsFactors ? logit_factor[r] : logit_factor_of(r),
      logits.centre[0][r] = centre[first_row() + 8 * r];
    return logits;
  }

  /// Finds the largest logits of a tile: references of rows that have none, and noted for calls
  /// that want them.
  __device__ __forceinline__ void look_at_logits(float* references, const PerRow& logit_factor,
                                                 int tile) const {
    Scores x;
    multiply_qk(x);
    hide(x, tile);
    PerRow tops;
    largest_logits(tops, x, keys().k, row_logits(logit_factor, tile), lane);
    note_largest(tops, references, shared.logit_top + first_row(), p.max_logit != nullptr, lane);
  }

  /// Adds a tile to the sums.
  template <bool kMasked>
  __device__ __forceinline__ void visit(Sums<D>& sums, const PerRow& logit_factor, int tile) {
    Scores x;
    Halves halves;
    PerRow sum;
    RowScales rows;
    uint32_t codes[16];
    wait_for(shared.stage_full, stage);
    const KeyNumbers& of_keys = keys();
    float* const value_top = shared.value_top + first_row();
    float* const references = shared.reference + first_row();
    if constexpr (kMasked)
      note_value_tops<kKeys>(value_top, shared.value_prefix[warpgroup * 4 + warp], of_keys.v,
                             band(), shared.work[slot.place()].s.nk, {corner_now(tile)}, lane);
    if (kMasked ? tile <= shared.last_look[slot.place()][warpgroup] : p.max_logit != nullptr)
      look_at_logits(references, logit_factor, tile);
    multiply_qk(x);
    if constexpr (kMasked) hide(x, tile);
    const auto make_p = [&]<bool kAgain>() {
      exponentials<D, kMasked, kAgain>(halves, sum, x, of_keys.k, row_logits(logit_factor, tile),
                                       references, lane);
    };
    const auto make_p8 = [&] {
      if constexpr (kMasked) {
        multiply_by_own_shares(halves, value_top, of_keys.v, lane);
      } else {
        const auto* share = reinterpret_cast<const __half*>(of_keys.share);
        multiply_by_shares(halves, [&](int i) { return share_of(share, i, lane); });
      }
      rows = scales_of(halves);
      make_codes(codes, halves, rows);
    };
    make_p.template operator()<false>();
    make_p8();
    if (__any_sync(0xffffffffu, fmaxf(sum[0], sum[1]) >= kTooLarge)) {
      const Outgrown outgrown(sum, lane);
      scores_of_warp<D>(x, shared.slot[slot.place()].q8, shared.stage[stage.place()].k8,
                        static_cast<uint32_t>(first_row()), lane);
      if constexpr (kMasked) hide(x, tile);
      PerRow tops;
      largest_logits(tops, x, of_keys.k, row_logits(logit_factor, tile), lane);
      raise(sums, references, tops, outgrown, lane, [&](int r, float shrink) {
        for (int octave = 0; octave < numerics::octave_of_block(tile); ++octave)
          shared.centre_logit[octave][first_row() + 8 * r] *= shrink;
      });
      make_p.template operator()<true>();
      limit(halves, sum, outgrown);
      make_p8();
    }
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      sums.sum[r] += sum[r];
      if constexpr (kMasked) rows.unit[r] = __fmul_rn(rows.unit[r], value_top[8 * r]);
    }
    multiply_pv<kMasked>(sums, codes, rows.unit, tile);
    stage.advance();
  }

  /// The logits of the centres of this warp's queries.
  ///
  /// And the first reference of a row: above the logit of key 0, which is the centre of its octave
  /// but for the rounding. So it follows from the row alone, wherever the walk begins. Rows that do
  /// not see key 0 have none, and look at the logits of their first tile; nor do rows without a
  /// centre, whose first tile takes a second pass.
  __device__ void start_rows() const {
    int dots[32];
    const Operand<D> centres{
        place + static_cast<uint32_t>(slot.place()) * arch::places(sizeof(shared.centre8[0])),
        offsetof(Plan, centre8)};
    find_centre_logits(dots, shared.centre_logit, queries_at(), centres,
                       shared.centre_scale[slot.place()],
                       shared.logit_factor[slot.place()] + first_row(), first_row(), lane);
    const int first_key = shared.work[slot.place()].q0 + first_row() + band().begin;
    const float unit = shared.centre_scale[slot.place()][0];
    if (lane % 4 == 0)
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        constexpr float kMostRounded = 0.5f * 127.0f * D * 1.01f;
        shared.reference[first_row() + 8 * r] =
            first_key + 8 * r <= 0 && unit > 0.0f
                ? (static_cast<float>(dots[2 * r]) - kMostRounded) * (unit * logit_factor_of(r)) +
                      kHeadroom
                : kNoReference;
      }
    __syncwarp();
  }

  __device__ __forceinline__ void release() {
    if (lane == 0) arrive_at(shared.stage_empty, stage);
  }
  /// A tile that this warpgroup's queries do not see.
  __device__ void skip() {
    wait_for(shared.stage_full, stage);
    __syncwarp();
    release();
    stage.advance();
  }

  /// Adds all tiles that the warpgroup sees, from `tile` on. Masked tiles before and behind whole
  /// ones have the same loop, because they have the most code. Whole ones have another: a loop with
  /// a branch between masked and whole tiles would move the sums from register to register. No loop
  /// goes on behind the end of an octave.
  __device__ __forceinline__ void sweep(Sums<D>& sums, const PerRow& logit_factor, int& tile,
                                        const Seen& seen) {
#pragma unroll 1
    while (tile < seen.end) {
      const int octave_end =
          static_cast<int>(numerics::first_block_of(numerics::octave_of_block(tile) + 1));
      if (tile >= seen.whole_begin && tile < seen.whole_end) {
        const int end = min(seen.whole_end, octave_end);
#pragma unroll 1
        for (; tile < end; ++tile) visit<false>(sums, logit_factor, tile);
      } else {
        const int end = min(tile < seen.whole_begin ? seen.whole_begin : seen.end, octave_end);
#pragma unroll 1
        for (; tile < end; ++tile) visit<true>(sums, logit_factor, tile);
      }
      note_row_sums(sums, tile, seen.end);
    }
  }

  /// Notes the row sums behind the last tile of an octave. `tile`: the next one.
  __device__ __forceinline__ void note_row_sums(const Sums<D>& sums, int tile, int end) const {
    const int octave = numerics::octave_of_block(tile - 1);
    if (tile != end && numerics::octave_of_block(tile) == octave) return;
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const float sum = tile::quad_sum(sums.sum[r]);
      if (lane % 4 == 0) shared.centre_logit[octave][first_row() + 8 * r] = sum;
    }
    __syncwarp();
  }
  /// Adds what the centres of V have been taken out of.
  __device__ __forceinline__ void add_centres(Sums<D>& sums, const Seen& seen) const {
    if (seen.end <= max(seen.begin, 1)) return;
    const int first = numerics::octave_of_block(seen.begin),
              last = numerics::octave_of_block(seen.end - 1);
    const float* const scale = shared.value_centre_scale[slot.place()];
    const auto sum_up_to = [&](int octave, int r) {
      return octave < first ? 0.0f : shared.centre_logit[min(octave, last)][first_row() + 8 * r];
    };
    const Operand<64> centres{
        place + static_cast<uint32_t>(slot.place()) * arch::places(sizeof(shared.value_centres[0])),
        offsetof(Plan, value_centres)};
    add_value_centres(sums, centres, last + 1, lane, [&](int octave, int r) {
      return (sum_up_to(octave, r) - sum_up_to(octave - 1, r)) * scale[octave];
    });
  }

  __device__ void run() {
    for (;; slot.advance()) {
      wait_for(shared.slot_full, slot);
      const Work& w = shared.work[slot.place()];
      if (w.last) return;
      const Seen& seen = shared.seen[slot.place()][warpgroup];
      const PerRow logit_factor = {logit_factor_of(0), logit_factor_of(1)};
      if (p.max_logit != nullptr && lane % 4 == 0)
#pragma unroll
        for (int r = 0; r < 2; ++r) shared.logit_top[first_row() + 8 * r] = kNoReference;
      start_rows();
      Sums<D> sums;
      // The tiles of the walk in order: those that this warpgroup does not see, masked ones, whole
      // ones, masked ones, and again some that it does not see.
      int tile = w.walk.first;
      for (; tile < seen.begin; ++tile) skip();
      sweep(sums, logit_factor, tile, seen);
      add_centres(sums, seen);
      for (; tile < w.walk.first + w.walk.steps; ++tile) skip();
      if (w.q0 + warpgroup * 64 < w.end)
        store<T>(sums, p, w, shared.reference, shared.logit_top, first_row(), lane);
      __syncwarp();
      if (lane == 0) arrive_at(shared.slot_empty, slot);
    }
  }
};

}  // namespace sagebwd::cuda::sm90::fwd
