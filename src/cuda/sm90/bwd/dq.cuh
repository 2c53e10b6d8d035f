// SPDX-License-Identifier: Apache-2.0
// The warpgroup that makes dQ. Three of its threads also start all copies.
#pragma once

#include <cstddef>
#include <cstdint>
#include <type_traits>

#include "cuda/arch/global_add.cuh"
#include "cuda/arch/wgmma.cuh"
#include "cuda/sm90/bwd/keys.cuh"
#include "cuda/sm90/bwd/row_sums.cuh"
#include "cuda/sm90/bwd/shared.cuh"
#include "cuda/sm90/bwd/turns.cuh"
#include "cuda/sm90/codes.cuh"
#include "cuda/sm90/operand.cuh"
#include "numerics/octaves.h"

namespace sagebwd::cuda::sm90::bwd {

template <int D>
struct Copies {
  using Plan = SharedPlan<D>;

  const BackwardParams& p;
  Plan& shared;
  Step<kQueries<D>> front, back;  // the next tile of each ring
  int front_place = 0, back_place = 0;
  const OctaveStats* octave_stats;  // of the octave of the keys

  __device__ Copies(const BackwardParams& params, Plan& plan)
      : p(params),
        shared(plan),
        front(plan.walk),
        back(plan.walk),
        octave_stats(p.octave_stats + numerics::octave_of_block(plan.walk.key0 / kKeys) * p.slabs) {
  }

  __device__ void load_keys() {
    const Walk& w = shared.walk;
    const uint32_t full = arch::shared_address(&shared.keys_full);
    const int row = static_cast<int>(w.key_row);
    arch::barrier_expect(full, Plan::kKeyBytes);
    arch::copy_rows(arch::shared_address(shared.k8), p.k8, 0, row, full);
    arch::copy_bulk(arch::shared_address(shared.v_scale), p.v_scale + w.key_row,
                    sizeof(shared.v_scale), full);
    arch::copy_bulk(arch::shared_address(shared.k_scale), p.k_scale + w.key_row,
                    sizeof(shared.k_scale), full);
  }
  __device__ void load_front() {
    if (front.left == 0) return;
    auto& to = shared.front[front_place];
    const uint32_t full = arch::shared_address(&shared.front_full[front_place]);
    const int row = static_cast<int>(front.row);
    arch::barrier_expect(full, Plan::kFrontBytes);
    arch::copy_rows(arch::shared_address(to.q8), p.q8, 0, row, full);
    if (p.do16_is_given)
      arch::copy_tokens(arch::shared_address(to.do16), p.do16, front.query,
                        p.heads_of_rows.divide(row), static_cast<int>(shared.walk.s.batch), full);
    else
      arch::copy_panels(arch::shared_address(to.do16), p.do16, row, full);
    arch::copy_bulk(arch::shared_address(to.stats), p.stats + front.row / kSlab, sizeof(to.stats),
                    full);
    front.advance(), front_place ^= 1;
  }
  /// The rest of a front. Whose bytes come first does not matter: load_front says how many there
  /// are, and the barrier waits for that.
  __device__ void load_octave() {
    if (front.left == 0) return;
    auto& to = shared.front[front_place];
    arch::copy_bulk(arch::shared_address(to.octave), octave_stats + front.row / kSlab,
                    sizeof(to.octave), arch::shared_address(&shared.front_full[front_place]));
    front.advance(), front_place ^= 1;
  }
  __device__ void load_back() {
    if (back.left == 0) return;
    auto& to = shared.back[back_place];
    const uint32_t full = arch::shared_address(&shared.back_full[back_place]);
    const int row = static_cast<int>(back.row / kSlab * D);
    arch::barrier_expect(full, Plan::kBackBytes);
    arch::copy_rows(arch::shared_address(to.q8t), p.q8t, 0, row, full);
    arch::copy_rows(arch::shared_address(to.do8t), p.do8t, 0, row, full);
    back.advance(), back_place ^= 1;
  }
};

/// Sum: float or __half.
template <int D, typename Sum, Wants kWants>
struct DqMaker {
  using Plan = SharedPlan<D>;

  const BackwardParams& p;
  Plan& shared;
  uint32_t warp, lane;
  uint32_t place;  // of the shared memory, for products

  using Totals = RowSums<kWants == Wants::what_comes>;

  /// Codes of 16 queries of a warp, A operands: one scale per query over the keys of the block.
  __device__ __forceinline__ RowScales quantize(uint32_t (&codes)[16], typename Plan::Slab slab,
                                                Totals& totals) const {
    uint32_t x[32];
    uint32_t at = arch::shared_address(shared.ds[slab.place()]) + (warp * 16 + lane % 16) * 128 +
                  ((lane / 16 ^ lane % 8) << 4);
    arch::keep(at);
#pragma unroll
    for (uint32_t i = 0; i < 8; ++i) {  // 16 keys
      uint32_t(&to)[4] = *reinterpret_cast<uint32_t(*)[4]>(x + 4 * i);
      arch::ldmatrix_x4(to, (at ^ (i % 4 << 5)) + i / 4 * (kSlab * 128));
    }
    __syncwarp();
    if (lane == 0) arrive_at(shared.ds_empty, slab);
    totals.take(x);
    uint32_t most[2] = {0, 0};
#pragma unroll
    for (int i = 0; i < 32; i += 4)
#pragma unroll
      for (int r = 0; r < 2; ++r)
        most[r] = arch::half2_max(arch::half2_max(most[r], arch::half2_abs(x[i + r])),
                                  arch::half2_abs(x[i + 2 + r]));
    const RowScales scales = lifted_row_scales<127>(x, row_tops(most[0], most[1]));
#pragma unroll
    for (int i = 0; i < 8; ++i)
#pragma unroll
      for (int r = 0; r < 2; ++r)
        codes[2 * i + r] =
            arch::half2_codes<arch::Bytes::s8>(x[4 * i + r], x[4 * i + 2 + r], scales.factor[r]);
    return scales;
  }

  /// dQ += codes·K8, 32 channels at a time: more would take more registers than are left.
  __device__ __forceinline__ void multiply(uint32_t (&codes)[16], const float (&unit)[2],
                                           Sum* to) const {
    constexpr int kChannels = 32;
#pragma unroll 1
    for (int part = 0; part < D / kChannels; ++part, to += kChannels * 16) {
      int acc[kChannels / 2];
      const Operand<kSlab> k8t{
          place + static_cast<uint32_t>(part) * arch::places(kChannels * kSlab),
          offsetof(Plan, k8t)};
      arch::settle(codes);
      arch::wgmma_fence();
#pragma unroll
      for (int step = 0; step < 4; ++step)
        arch::wgmma_s8(acc, codes + 4 * step, k8t.from_row(step / 2 * D).step(step % 2), step > 0);
      arch::wgmma_commit();
      arch::wgmma_wait<0>();
      arch::settle(acc);
      arch::settle(codes);
      float x[kChannels / 2];
#pragma unroll
      for (int i = 0; i < kChannels / 2; ++i) x[i] = static_cast<float>(acc[i]) * unit[i / 2 % 2];
      if constexpr (std::is_same_v<Sum, float>) {
#pragma unroll
        for (int i = 0; i < kChannels / 2; i += 4)
          arch::global_add(to + i * 32, lane, x[i], x[i + 1], x[i + 2], x[i + 3]);
      } else {
#pragma unroll
        for (int i = 0; i < kChannels / 2; i += 8)
          arch::global_add_halves(
              to + i * 32, lane,
              {arch::half2_of(x[i], x[i + 1]), arch::half2_of(x[i + 2], x[i + 3]),
               arch::half2_of(x[i + 4], x[i + 5]), arch::half2_of(x[i + 6], x[i + 7])});
      }
    }
  }

  /// The operand of K, and its scale.
  __device__ __forceinline__ float make_keys() const {
    const Walk& w = shared.walk;
    const int octave = numerics::octave_of_block(w.key0 / kKeys);
    const int64_t row =
        w.kv_head * p.key_blocks + w.s.k_pad / kBlock + numerics::first_block_of(octave);
    const KeysAgain<D> again(shared.k8, shared.k_scale, p.centre8 + row * D, p.centre_scale[row],
                             p.dq_mean + (static_cast<int64_t>(w.s.index) * p.hk + w.kv_head) * D,
                             warp * 32 + lane);
    return again.write(shared.k8t, shared.dq_top);
  }

  __device__ void run() {
    const Walk& w = shared.walk;
    // Three threads share the copies, so that none keeps its warp waiting for long.
    Copies<D> copies(p, shared);
    const bool loads_front = warp == 0 && lane == 0, loads_back = warp == 1 && lane == 0,
               loads_octave = warp == 2 && lane == 0;
    if (loads_front) {
      copies.load_keys();
      copies.load_front(), copies.load_front();
    }
    if (loads_back) copies.load_back(), copies.load_back();
    if (loads_octave) copies.load_octave(), copies.load_octave();
    typename Plan::Slab slab;
    arch::barrier_wait(arch::shared_address(&shared.keys_full), 0);
    const float scale = make_keys();
    share_with_products(Meeting::dq_maker);
    const float k_top =
        __uint_as_float(p.k_top[static_cast<int64_t>(w.s.index) * p.hk + w.kv_head]);
    const float k_unit = k_top > 0.0f ? kDqShift * scale / k_top : 0.0f;
    Step<kSlab> step(w);
    Turns<kWants> turns(p.turns, warp, lane);
    Totals totals(p.row_sum, lane);
    // The lifts of a lane's two queries, asked for one slab early.
    const auto lifts_at = [&](uint32_t row, float(&to)[2]) {
      const float* from = p.dq_lift + warp * 16 + lane / 4 + row;
      to[0] = from[0], to[1] = from[8];
    };
    float lift[2];
    lifts_at(step.row, lift);
#pragma unroll 1
    while (step.left > 0) {
      const uint32_t row = step.row;
      // The slabs of a tile have the same turn: whoever visits the tile adds to all of them.
      const int tile_end = (step.query / kQueries<D> + 1) * kQueries<D>;
      turns.ask(w, min(tile_end, w.s.nq) - 1, row);
      totals.start(lift);
      const float unit_here[2] = {lift[0] * k_unit, lift[1] * k_unit};
      step.advance();
      if (step.left > 0) lifts_at(step.row, lift);
      wait_for(shared.ds_full, slab);
      if (slab.number % kSlabs<D> == kSlabs<D> - 1) {  // the last of its tile
        if (loads_front) copies.load_front();
        if (loads_back && slab.number >= kSlabs<D>) copies.load_back();
        if (loads_octave) copies.load_octave();
      }
      uint32_t codes[16];
      const RowScales scales = quantize(codes, slab, totals);
      const float unit[2] = {scales.unit[0] * unit_here[0], scales.unit[1] * unit_here[1]};
      turns.pass();
      turns.wait();
      totals.add(row + warp * 16);
      multiply(codes, unit,
               static_cast<Sum*>(p.dq_sum) + static_cast<uint64_t>(row + warp * 16) * D);
      slab = slab.next();
    }
    turns.pass();
  }
};

}  // namespace sagebwd::cuda::sm90::bwd
