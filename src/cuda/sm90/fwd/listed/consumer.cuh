// SPDX-License-Identifier: Apache-2.0
// A consumer of the forward with block lists: a warpgroup with 64 of the queries.
#pragma once

#include <cmath>
#include <cstddef>
#include <cstdint>

#include "cuda/arch/wgmma.cuh"
#include "cuda/sm90/fwd/again.cuh"
#include "cuda/sm90/fwd/centres.cuh"
#include "cuda/sm90/fwd/listed/shared.cuh"
#include "cuda/sm90/fwd/results.cuh"
#include "cuda/sm90/fwd/rows.cuh"
#include "cuda/sm90/fwd/shares.cuh"
#include "cuda/sm90/operand.cuh"
#include "numerics/octaves.h"

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
  // Rings would take more registers.
  Nth<kStages> stage{};
  Nth<kSlots> piece{};

  __device__ uint32_t slot() const { return piece.place(); }
  __device__ int first_row() const {
    return warpgroup * 64 + static_cast<int>(warp * 16 + lane / 4);
  }

  /// The place of a stage, for products.
  __device__ uint32_t stage_at(uint32_t i) const { return place + i * arch::places(sizeof(Stage)); }

  /// Q8 of the warpgroup. Worked out each time, because kept it would take eight registers.
  __device__ Operand<D> queries_at() const {
    uint32_t at = place + slot() * arch::places(sizeof(Slot)) +
                  static_cast<uint32_t>(warpgroup) * arch::places(64 * D);
    arch::keep(at);
    return {at, offsetof(Plan, slot)};
  }

  /// S = Q8·K8ᵀ of a stage; only issued.
  __device__ __forceinline__ void issue_scores(Scores& x, uint32_t i) const {
    const Operand<D> queries = queries_at(), keys{stage_at(i), offsetof(Plan, stage)};
    arch::settle(x);
    arch::wgmma_fence();
#pragma unroll
    for (int step = 0; step < D / 32; ++step)
      arch::wgmma_8(x, queries.step(step), keys.step(step), step > 0);
    arch::wgmma_commit();
  }

  // What the thread's rows have.
  __device__ float* value_tops() const { return shared.value_top + first_row(); }
  __device__ float* references() const { return shared.reference + first_row(); }
  __device__ RowLogits<2> row_logits(const StageNumbers& numbers) const {
    RowLogits<2> logits;
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      // From shared memory each time, because no registers are left to keep it in.
      logits.factor[r] = shared.logit_factor[slot()][first_row() + 8 * r];
#pragma unroll
      for (int half = 0; half < 2; ++half)
        logits.centre[half][r] = shared.centre_logit[numbers.octave[half]][first_row() + 8 * r];
    }
    return logits;
  }

  /// Where a tile of keys meets the thread's rows.
  __device__ Corner corner(int tile) const {
    return {shared.work[slot()].q0 + first_row(), tile * kHalf};
  }
  /// Whether the mask cuts a tile of the stage, which is also behind the last key.
  __device__ bool is_cut(const StageNumbers& numbers) const {
    const tile::WholeTiles whole = shared.work[slot()].whole[warpgroup];
    return !whole.holds(numbers.tile[0]) || !whole.holds(numbers.tile[1]);
  }
  __device__ __forceinline__ void hide(Scores& x, const StageNumbers& numbers) const {
#pragma unroll
    for (int half = 0; half < 2; ++half)
      hide_keys<kHalf>(x + 32 * half, shared.band[slot()], shared.work[slot()].s,
                       corner(numbers.tile[half]), lane);
  }

  /// Shares of V for all rows of the warp, and the largest scale. Where the mask cuts the stage
  /// every row has its own, which P has been multiplied by when it meets these: they are ones.
  __device__ __half* shares() const {
    return shared.of_warp[warpgroup * 4 + static_cast<int>(warp)].share;
  }
  __device__ __forceinline__ void prepare_shares(const StageNumbers& numbers, bool cut) const {
    if (!cut) return find_shares(shares(), value_tops(), numbers.v, lane);
    note_value_tops<kHalf>(value_tops(),
                           shared.of_warp[warpgroup * 4 + static_cast<int>(warp)].value_prefix,
                           numbers.v, shared.band[slot()], shared.work[slot()].s.nk,
                           {corner(numbers.tile[0]), corner(numbers.tile[1])}, lane);
    constexpr uint32_t kOnes = 0x3c003c00u;
    reinterpret_cast<uint2*>(shares())[lane] = make_uint2(kOnes, kOnes);
    __syncwarp();
  }

  /// The largest logits of a stage: references of rows that have none, and noted for calls that
  /// want them.
  __device__ __forceinline__ void look_at_logits(const Scores& x,
                                                 const StageNumbers& numbers) const {
    PerRow tops;
    largest_logits(tops, x, numbers.k, row_logits(numbers), lane);
    note_largest(tops, references(), shared.logit_top + first_row(), p.max_logit != nullptr, lane);
  }

  __device__ __forceinline__ void spread_poison(Sums<D>& sums, const StageNumbers& numbers) const {
#pragma unroll
    for (int half = 0; half < 2; ++half)
      if (numbers.block[half].is_poisoned())
        fwd::spread_poison<kHalf>(sums, shared.band[slot()], shared.work[slot()].s.nk,
                                  corner(numbers.tile[half]), numbers.k + half * kHalf,
                                  numbers.v + half * kHalf);
  }

  /// O += unit·codes·V8 of stage i.
  template <arch::Bytes kCode>
  __device__ __forceinline__ void multiply_pv(Sums<D>& sums, uint32_t (&codes)[16],
                                              const PerRow& unit, uint32_t i) const {
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

  /// Adds the row sums that are not counted yet to those of their octave.
  __device__ void count_rows(const Sums<D>& sums, int octave) const {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const float sum = tile::quad_sum(sums.sum[r]);
      const int row = first_row() + 8 * r;
      if (lane % 4 != 0) continue;
      shared.octave_sum[octave][row] += sum - shared.counted[row];
      shared.counted[row] = sum;
    }
    __syncwarp();
  }
  /// The same before a stage whose P is not in the sums, where its tiles are in another octave.
  /// Lists may have any order.
  __device__ void count_octaves(const Sums<D>& sums, const Halves& p,
                                const StageNumbers& numbers) const {
    int& octave = shared.counted_octave[warpgroup * 4 + static_cast<int>(warp)];
    if (octave == numbers.octave[0] && octave == numbers.octave[1]) return;
    count_rows(sums, octave);
    if (numbers.octave[0] != numbers.octave[1]) {  // what follows belongs to the second tile
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        float sum = 0.0f;
#pragma unroll
        for (int j = 0; j < 8; ++j) sum += arch::half2_sum(p[2 * j + r]);
        sum = tile::quad_sum(sum);
        const int row = first_row() + 8 * r;
        if (lane % 4 != 0) continue;
        shared.octave_sum[numbers.octave[0]][row] += sum, shared.counted[row] += sum;
      }
    }
    __syncwarp();
    if (lane == 0) octave = numbers.octave[1];
    __syncwarp();
  }
  /// Adds what the centres of V have been taken out of.
  __device__ __forceinline__ void add_centres(Sums<D>& sums, const Work& w) const {
    count_rows(sums, shared.counted_octave[warpgroup * 4 + static_cast<int>(warp)]);
    const float* const scale = shared.value_centre_scale[slot()];
    const Operand<64> centres{place + slot() * arch::places(sizeof(shared.value_centres[0])),
                              offsetof(Plan, value_centres)};
    add_value_centres(sums, centres, numerics::octaves_of(w.s.nk), lane, [&](int octave, int r) {
      return octave < kMostOctaves ? shared.octave_sum[octave][first_row() + 8 * r] * scale[octave]
                                   : 0.0f;
    });
  }

  /// Adds a stage, whose scores are there, to the sums, and makes the scores of the next one, if
  /// there are more; else it makes some that nobody needs.
  template <bool kLeading>
  __device__ __forceinline__ void visit(Sums<D>& sums, Scores& x, bool first, bool more) {
    Halves halves;
    PerRow sum, unit;
    uint32_t codes[16];
    const uint32_t now = stage.place();
    const StageNumbers& numbers = shared.numbers[now];
    const bool cut = is_cut(numbers);
    if (cut) hide(x, numbers);
    prepare_shares(numbers, cut);
    if (first || p.max_logit != nullptr) look_at_logits(x, numbers);
    arch::settle(x);  // nothing that was worked out there is kept: there are no registers for that
    const auto make_p = [&]<bool kAgain>() {
      exponentials<D, true, kAgain>(halves, sum, x, numbers.k, row_logits(numbers), references(),
                                    lane);
    };
    make_p.template operator()<false>();
    if (__any_sync(0xffffffffu, fmaxf(sum[0], sum[1]) >= kTooLarge)) {
      // Again, with references that suit. The scores are gone: there are no registers for both.
      // Once only: references of huge logits are rounded to many units, and would never suit.
      const Outgrown outgrown(sum, lane);
      scores_of_warp<D>(x, shared.slot[slot()].q8, shared.stage[now].k8[0],
                        static_cast<uint32_t>(first_row()), lane);
      if (cut) hide(x, numbers);
      PerRow tops;
      largest_logits(tops, x, numbers.k, row_logits(numbers), lane);
      raise(sums, references(), tops, outgrown, lane, [&](int r, float shrink) {
        for (int octave = 0; octave < kMostOctaves; ++octave)
          shared.octave_sum[octave][first_row() + 8 * r] *= shrink;
        shared.counted[first_row() + 8 * r] *= shrink;
      });
      make_p.template operator()<true>();
      limit(halves, sum, outgrown);
    }
    count_octaves(sums, halves, numbers);
    if (cut) multiply_by_own_shares(halves, value_tops(), numbers.v, lane);
    spread_poison(sums, numbers);
    stage = stage.next();
    if (more) wait_for(shared.stage_full, stage);
    // The next scores are multiplied while codes are made of these. A leading stage has too many
    // codes for that.
    if constexpr (!kLeading) issue_scores(x, more ? stage.place() : now);
    multiply_by_shares(halves, [&](int i) { return share_of(shares(), i, lane); });
    const RowScales rows = scales_of(halves);
#pragma unroll
    for (int r = 0; r < 2; ++r)
      sums.sum[r] += sum[r], unit[r] = __fmul_rn(rows.unit[r], value_tops()[8 * r]);
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

  __device__ __forceinline__ void release(uint32_t i) {
    if (lane == 0) arch::barrier_arrive(arch::shared_address(&shared.stage_empty[i]));
  }
  /// A stage of a piece in which this warpgroup has no queries.
  __device__ void skip() {
    wait_for(shared.stage_full, stage);
    __syncwarp();
    release(stage.place());
    stage = stage.next();
  }

  /// Adds all stages of a piece.
  __device__ __forceinline__ void walk(Sums<D>& sums, const Work& w) {
    if (w.steps == 0) return;
    Scores x;
    wait_for(shared.stage_full, stage);
    issue_scores(x, stage.place());
    arch::wgmma_wait<0>();
    arch::settle(x);
    int left = w.steps;
#pragma unroll 1
    for (; left > w.steps - w.leading; --left) visit<true>(sums, x, left == w.steps, left > 1);
#pragma unroll 1
    for (; left > 0; --left) visit<false>(sums, x, left == w.steps, left > 1);
  }

  /// The logits of the centres of this warp's queries, and no references: those come from the first
  /// stage.
  __device__ void start_rows() const {
    int dots[32];
    const Operand<D> centres{place + slot() * arch::places(sizeof(shared.centre8[0])),
                             offsetof(Plan, centre8)};
    find_centre_logits(dots, shared.centre_logit, queries_at(), centres,
                       shared.centre_scale[slot()], shared.logit_factor[slot()] + first_row(),
                       first_row(), lane);
    if (lane % 4 == 0)
#pragma unroll
      for (int r = 0; r < 2; ++r)
        references()[8 * r] = shared.logit_top[first_row() + 8 * r] = kNoReference,
                         shared.counted[first_row() + 8 * r] = 0.0f;
#pragma unroll 1
    for (int octave = static_cast<int>(lane % 4); octave < kMostOctaves; octave += 4)
#pragma unroll
      for (int r = 0; r < 2; ++r) shared.octave_sum[octave][first_row() + 8 * r] = 0.0f;
    if (lane == 0) shared.counted_octave[warpgroup * 4 + static_cast<int>(warp)] = 0;
    __syncwarp();
  }

  __device__ void run() {
    for (;; piece = piece.next()) {
      wait_for(shared.slot_full, piece);
      const Work& w = shared.work[slot()];
      if (w.last) return;
      if (w.q0 + warpgroup * 64 < w.s.nq) {
        start_rows();
        Sums<D> sums;
        walk(sums, w);
        add_centres(sums, w);
        store<T>(sums, p, w, shared.reference, shared.logit_top, first_row(), lane);
      } else {
        for (int step = 0; step < w.steps; ++step) skip();
      }
      __syncwarp();
      if (lane == 0) arrive_at(shared.slot_empty, piece);
    }
  }
};

}  // namespace sagebwd::cuda::sm90::fwd::listed
