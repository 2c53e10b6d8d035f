// SPDX-License-Identifier: Apache-2.0
// A consumer: a warpgroup with 64 of the queries.
#pragma once

#include <cmath>
#include <cstddef>
#include <cstdint>

#include "cuda/arch/wgmma.cuh"
#include "cuda/sm90/fwd/again.cuh"
#include "cuda/sm90/fwd/results.cuh"
#include "cuda/sm90/fwd/rows.cuh"
#include "cuda/sm90/fwd/shared.cuh"
#include "cuda/sm90/fwd/softmax.cuh"
#include "cuda/sm90/operand.cuh"

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

  /// S = Q8·K8ᵀ of the tile in the stage.
  __device__ __forceinline__ void multiply_qk(Scores& x) const {
    const Operand<D> queries{place +
                                 static_cast<uint32_t>(slot.place()) * arch::places(sizeof(Slot)) +
                                 static_cast<uint32_t>(warpgroup) * arch::places(64 * D),
                             offsetof(Plan, slot)},
        keys{stage_at(), offsetof(Plan, stage)};
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
  /// Hides what the mask hides. `tile`: of keys, inside the sequence.
  __device__ void hide(Scores& x, int tile) const {
    hide_keys<kKeys>(x, p.mask, shared.work[slot.place()].s, corner(tile), lane);
  }
  __device__ void spread_poison(Sums<D>& sums, int tile) const {
    const Work& w = shared.work[slot.place()];
    const bool of_k = shared.scales[stage.place()].k_poisoned != 0;
    fwd::spread_poison<kKeys>(sums, p.mask, w.s, corner(tile), of_k ? p.k_scale + w.keys : nullptr,
                              shared.v_share[stage.place()]);
  }

  /// O += P8·V8 of the tile, which is free then.
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
      const BlockScales scales = shared.scales[stage.place()];
      if (part == 0) unit[0] = code_unit[0] * scales.v, unit[1] = code_unit[1] * scales.v;
      arch::wgmma_wait<0>();
      arch::settle(acc);
      if (part == kParts - 1) {
        arch::settle(codes);
        if ((scales.k_poisoned | scales.v_poisoned) != 0) spread_poison(sums, tile);
        release();
      }
      add_product(sums, part, acc, unit);
    }
  }

  /// Adds a tile to the sums.
  template <bool kMasked>
  __device__ __forceinline__ void visit(Sums<D>& sums, const PerRow& logit_factor, int tile,
                                        bool first) {
    Scores x;
    Halves halves;
    Factors<1> factor;
    PerRow sum;
    RowScales rows;
    uint32_t codes[16];
    wait_for(shared.stage_full, stage);
    multiply_qk(x);
    if constexpr (kMasked) hide(x, tile);
    const float k_scale = shared.scales[stage.place()].k;
#pragma unroll
    for (int r = 0; r < 2; ++r)
      factor[0][r] = (kKeepsFactors ? logit_factor[r] : logit_factor_of(r)) * k_scale;
    if (p.max_logit != nullptr) note_logits(x, factor, shared.logit_top + first_row(), lane);
    if (first) sums.start(x, factor);
    const __half* share = shared.v_share[stage.place()];
    const auto make_p = [&] {
      exponentials(halves, sum, x, factor, sums.reference);
      rows = take_share(halves, [&](int i) { return share_of(share, i, lane); });
      make_codes(codes, halves, rows);
    };
    make_p();
    // The sums are looked at last, so that most tiles run through all of it without a branch.
    while (__any_sync(0xffffffffu, fmaxf(sum[0], sum[1]) >= kTooLarge)) {
      // Again, with a reference that suits. The scores are gone: there are no registers for both.
      scores_of_warp<D>(x, shared.slot[slot.place()].q8, shared.stage[stage.place()].k8,
                        static_cast<uint32_t>(first_row()), lane);
      if constexpr (kMasked) hide(x, tile);
      sums.raise(x, factor);
      make_p();
    }
#pragma unroll
    for (int r = 0; r < 2; ++r) sums.sum[r] += sum[r];
    multiply_pv(sums, codes, rows.unit, tile);
    stage.advance();
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

  /// Adds the tiles from `tile` to `end`.
  template <bool kMasked>
  __device__ __forceinline__ void sweep(Sums<D>& sums, const PerRow& logit_factor, int& tile,
                                        int end, bool first) {
#pragma unroll 1
    for (; tile < end; ++tile, first = false) visit<kMasked>(sums, logit_factor, tile, first);
  }

  __device__ void run() {
    for (;; slot.advance()) {
      wait_for(shared.slot_full, slot);
      const Work& w = shared.work[slot.place()];
      if (w.last) return;
      const Seen seen = shared.seen[slot.place()][warpgroup];
      const PerRow logit_factor = {logit_factor_of(0), logit_factor_of(1)};
      if (p.max_logit != nullptr && lane % 4 == 0)
#pragma unroll
        for (int r = 0; r < 2; ++r) shared.logit_top[first_row() + 8 * r] = kNoReference;
      Sums<D> sums;
      // The tiles of the walk in order: those that this warpgroup does not see, masked ones, whole
      // ones, masked ones, and again some that it does not see. Loops of their own, because a loop
      // with a branch between masked and whole tiles moves the sums from register to register.
      int tile = w.walk.first;
      for (; tile < seen.begin; ++tile) skip();
      if (tile < seen.whole_begin) sweep<true>(sums, logit_factor, tile, seen.whole_begin, true);
      if (tile < seen.whole_end)
        sweep<false>(sums, logit_factor, tile, seen.whole_end, tile == seen.begin);
      if (tile < seen.end) sweep<true>(sums, logit_factor, tile, seen.end, tile == seen.begin);
      for (; tile < w.walk.first + w.walk.steps; ++tile) skip();
      if (w.q0 + warpgroup * 64 < w.end)
        store<T>(sums, p, w, shared.v_mean[slot.place()], shared.mean_logit[slot.place()],
                 shared.logit_top, first_row(), lane);
      __syncwarp();
      if (lane == 0) arrive_at(shared.slot_empty, slot);
    }
  }
};

}  // namespace sagebwd::cuda::sm90::fwd
