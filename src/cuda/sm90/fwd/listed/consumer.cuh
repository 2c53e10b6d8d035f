// SPDX-License-Identifier: Apache-2.0
// A consumer of the forward with block lists: a warpgroup with 64 of the queries.
#pragma once

#include <cmath>
#include <cstddef>
#include <cstdint>

#include "cuda/arch/wgmma.cuh"
#include "cuda/sm90/fwd/again.cuh"
#include "cuda/sm90/fwd/listed/shared.cuh"
#include "cuda/sm90/fwd/results.cuh"
#include "cuda/sm90/fwd/rows.cuh"
#include "cuda/sm90/operand.cuh"

namespace sagebwd::cuda::sm90::fwd::listed {

template <typename T, int D>
struct Consumer {
  using Plan = SharedPlan<D>;
  using Stage = typename Plan::Stage;
  using Slot = typename Plan::Slot;
  static constexpr int kChannels = 64;  // of a product P8·V8

  const ListedParams& p;
  Plan& shared;
  int warpgroup;        // its number
  uint32_t warp, lane;  // warp: inside the warpgroup
  uint32_t place;       // of the shared memory, for products
  Ring<kStages> stage{0};
  Nth<kSlots> piece{};  // a Ring would take another register

  __device__ uint32_t slot() const { return piece.place(); }
  __device__ int first_row() const {
    return warpgroup * 64 + static_cast<int>(warp * 16 + lane / 4);
  }

  /// The place of a stage, for products.
  __device__ uint32_t stage_at(int i) const {
    return place + static_cast<uint32_t>(i) * arch::places(sizeof(Stage));
  }

  /// S = Q8·K8ᵀ of a stage; only issued.
  __device__ __forceinline__ void issue_scores(Scores& x, int i) const {
    const Operand<D> queries{place + slot() * arch::places(sizeof(Slot)) +
                                 static_cast<uint32_t>(warpgroup) * arch::places(64 * D),
                             offsetof(Plan, slot)},
        keys{stage_at(i), offsetof(Plan, stage)};
    arch::settle(x);
    arch::wgmma_fence();
#pragma unroll
    for (int step = 0; step < D / 32; ++step)
      arch::wgmma_8(x, queries.step(step), keys.step(step), step > 0);
    arch::wgmma_commit();
  }

  /// Where a tile of keys meets the thread's rows.
  __device__ Corner corner(int tile) const {
    return {shared.work[slot()].q0 + first_row(), tile * kHalf};
  }
  /// Hides what the mask hides of one of the stage's tiles, and what is after the last key.
  template <int kWhich>
  __device__ __forceinline__ void hide(Scores& x, int tile) const {
    hide_keys<kHalf>(x + 32 * kWhich, p.mask, shared.work[slot()].s, corner(tile), lane);
  }
  __device__ __forceinline__ void hide(Scores& x, const int2& tiles) const {
    const tile::WholeTiles whole = shared.work[slot()].whole[warpgroup];
    if (!whole.holds(tiles.x)) hide<0>(x, tiles.x);
    if (!whole.holds(tiles.y)) hide<1>(x, tiles.y);
  }

  __device__ void spread_poison(Sums<D>& sums, int tile, const __half* share, bool of_k) const {
    const Work& w = shared.work[slot()];
    fwd::spread_poison<kHalf>(sums, p.mask, w.s, corner(tile), of_k ? p.k_scale + w.keys : nullptr,
                              share);
  }

  /// O += unit·codes·V8 of stage i.
  template <arch::Bytes kCode>
  __device__ __forceinline__ void multiply_pv(Sums<D>& sums, uint32_t (&codes)[16],
                                              const PerRow& unit, int i) const {
    const Operand<kSlab> v8t{stage_at(i), offsetof(Plan, stage) + sizeof(Stage::k8)};
    arch::settle(codes);
#pragma unroll
    for (int part = 0; part < D / kChannels; ++part) {
      int acc[kChannels / 2];
      arch::wgmma_fence();
#pragma unroll
      for (int step = 0; step < 4; ++step) {
        const uint64_t b = v8t.from_row(step / 2 * D + part * kChannels).step(step % 2);
        if constexpr (kCode == arch::Bytes::u8)
          arch::wgmma_u8(acc, codes + 4 * step, b, step > 0);
        else
          arch::wgmma_s8(acc, codes + 4 * step, b, step > 0);
      }
      arch::wgmma_commit();
      arch::wgmma_wait<0>();
      arch::settle(acc);
      if (part == D / kChannels - 1) arch::settle(codes);
      add_product(sums, part, acc, unit);
    }
  }

  /// Adds a stage, whose scores are there, to the sums, and makes the scores of the next one, if
  /// there are more; else it makes some that nobody needs.
  template <bool kLeading>
  __device__ __forceinline__ void visit(Sums<D>& sums, Scores& x, bool first, bool more) {
    Halves halves;
    Factors<2> factor;
    PerRow sum, unit;
    uint32_t codes[16];
    const int now = stage.place();
    const int2 tiles = shared.tiles[now];
    hide(x, tiles);
    const BlockScales scales[2] = {shared.scales[now][0], shared.scales[now][1]};
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      // From shared memory each time, because no registers are left to keep it in.
      const float logit_factor = shared.logit_factor[slot()][first_row() + 8 * r];
#pragma unroll
      for (int half = 0; half < 2; ++half) factor[half][r] = logit_factor * scales[half].k;
    }
    if (p.max_logit != nullptr) note_logits(x, factor, shared.logit_top + first_row(), lane);
    if (first) sums.start(x, factor);
    for (bool again = false;; again = true) {
      exponentials(halves, sum, x, factor, sums.reference);
      if (again || !__any_sync(0xffffffffu, fmaxf(sum[0], sum[1]) >= kTooLarge)) break;
      // Again, with a reference that suits. The scores are gone: there are no registers for both.
      // Once only: references of huge logits are rounded to many units, and would never suit.
      scores_of_warp<D>(x, shared.slot[slot()].q8, shared.stage[now].k8[0],
                        static_cast<uint32_t>(first_row()), lane);
      hide(x, tiles);
      sums.raise(x, factor);
    }
#pragma unroll
    for (int half = 0; half < 2; ++half)
      if ((scales[half].k_poisoned | scales[half].v_poisoned) != 0)
        spread_poison(sums, half == 0 ? tiles.x : tiles.y, shared.v_share[now][half],
                      scales[half].k_poisoned != 0);
    stage.advance();
    if (more) wait_for(shared.stage_full, stage);
    // The next scores are multiplied while codes are made of these. A leading stage has too many
    // codes for that.
    if constexpr (!kLeading) issue_scores(x, more ? stage.place() : now);

    // Shares are relative to the largest scale of V of their own block. The smaller of the two
    // scales goes with them. Where both are zero so are all codes of V, whatever P is.
    const float top = fmaxf(scales[0].v, scales[1].v), inverse = arch::reciprocal_approx(top);
    uint32_t ratio[2];
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const float one = fminf(scales[half].v * inverse, 1.0f);
      ratio[half] = arch::half2_of(one, one);
    }
    const __half* const share = shared.v_share[now][0];
    const RowScales rows = take_share(halves, [&](int i) {
      const uint2 s = share_of(share, i, lane);
      return make_uint2(arch::half2_mul(s.x, ratio[i / 4]), arch::half2_mul(s.y, ratio[i / 4]));
    });
#pragma unroll
    for (int r = 0; r < 2; ++r) sums.sum[r] += sum[r], unit[r] = rows.unit[r] * top;
    if constexpr (kLeading) {
      // Always so, but a branch keeps the compiler from making both kinds of codes at once, for
      // which there are no registers.
      if (shared.work[slot()].leading > 0) {
        const PerRow rest_unit = {unit[0] * (1.0f / kRestLevels), unit[1] * (1.0f / kRestLevels)};
        make_rest(codes, halves, rows);
        multiply_pv<arch::Bytes::s8>(sums, codes, rest_unit, now);
      }
      issue_scores(x, more ? stage.place() : now);
    }
    make_codes(codes, halves, rows);
    multiply_pv<arch::Bytes::u8>(sums, codes, unit, now);
    arch::settle(x);
    release(now);
  }

  __device__ __forceinline__ void release(int i) {
    if (lane == 0) arch::barrier_arrive(arch::shared_address(&shared.stage_empty[i]));
  }
  /// A stage of a piece in which this warpgroup has no queries.
  __device__ void skip() {
    wait_for(shared.stage_full, stage);
    __syncwarp();
    release(stage.place());
    stage.advance();
  }

  /// Adds all stages of a piece.
  __device__ __forceinline__ void walk(Sums<D>& sums, const Work& w) {
    if (w.steps == 0) return;
    Scores x;
    wait_for(shared.stage_full, stage);
    issue_scores(x, stage.place());
    arch::wgmma_wait<0>();
    arch::settle(x);
    int step = 0;
#pragma unroll 1
    for (; step < w.leading; ++step) visit<true>(sums, x, step == 0, step + 1 < w.steps);
#pragma unroll 1
    for (; step < w.steps; ++step) visit<false>(sums, x, step == 0, step + 1 < w.steps);
  }

  __device__ void run() {
    for (;; piece = piece.next()) {
      wait_for(shared.slot_full, piece);
      const Work& w = shared.work[slot()];
      if (w.last) return;
      if (p.max_logit != nullptr && lane % 4 == 0)
#pragma unroll
        for (int r = 0; r < 2; ++r) shared.logit_top[first_row() + 8 * r] = kNoReference;
      if (w.q0 + warpgroup * 64 < w.s.nq) {
        Sums<D> sums;
        walk(sums, w);
        store<T, KeyScales::block>(sums, p, w, v_mean_of<D>(p, w), p.q_mean_logit + w.row,
                                   shared.logit_top, first_row(), lane);
      } else {
        for (int step = 0; step < w.steps; ++step) skip();
      }
      __syncwarp();
      if (lane == 0) arrive_at(shared.slot_empty, piece);
    }
  }
};

}  // namespace sagebwd::cuda::sm90::fwd::listed
