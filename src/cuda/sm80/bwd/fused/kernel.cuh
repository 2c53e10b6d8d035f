// SPDX-License-Identifier: Apache-2.0
// dK, dV and dQ in one pass over the scores: one thread block per tile_k keys of a key head,
// looping over tiles of tile_q queries of its query heads.
//
//                       query strips →
//                      ┌────┬────┬──      Sᵀ  = K8·Q8ᵀ  (INT8)     P  = 2^(S - LSE)
//   key strips         │ w0 │ w1 │ …      dPᵀ = V·dOᵀ   (16 bit)   dS = P∘(dP - D)
//   of 32 keys      →  ├────┼────┼──      dV += P8ᵀ·dO8 (INT8)     dK += dS8ᵀ·Q8 (INT8)
//                      │ w2 │ w3 │ …      dQ += dS8·K8  (INT8), added up in global memory
//
// Scores are transposed, so keys are rows. The codes of P and dS are then A operands straight from
// registers, because dO8 and Q8 come transposed in the order of the accumulators (tile/codes.cuh).
// The warps of a key strip hand their codes to each other, and each owns a part of the channels of
// dK and dV. For dQ the codes are turned around in registers: the warps of a query strip hand them
// to each other, and each owns a part of the channels of dQ.
//
// What is quantised is y = dS·(logit factor of the query). Codes for dK have one scale
// per key and codes for dQ one per query, so either factor can be taken out again at the very end,
// and one y serves both products.
//
// But in `paper` every key has a scale of K, which only the logits need: dQ is made from other
// codes of the same keys, whose scale those of a thread block share (sm80/quantize/operands.h,
// DqKeys). The logits of the centre that keys lack are part of the exponents of a query, of which
// it has one for each octave of keys; dO times the centre of V is part of its gradients likewise.
//
// A round of the loop has two barriers. They also protect the query tiles in shared memory: the
// next one is loaded behind the first barrier, when S and dP of this one are done, and is there at
// the second. What dV and dK read lies there twice, or, where memory is short, is loaded behind a
// third barrier. Where it is shortest (one_place), that and the codes lie where Q8 and dO were, and
// nothing is loaded ahead.
//
// What else a call may ask for is known when a kernel is made (kGeneral and so on): additions in
// turn (turn.cuh), row sums of dS (row_sums.cuh), dither of dQ (dither_dq.cuh), block lists, a cap.
//
// config.cuh has the instances, walk.cuh the order of the tiles, shared.cuh the shared memory.
#pragma once

#include <cstddef>

#include "cuda/arch/target.cuh"
#include "cuda/sm80/bwd/fused/codes.cuh"
#include "cuda/sm80/bwd/fused/dither_dq.cuh"
#include "cuda/sm80/bwd/fused/loads.cuh"
#include "cuda/sm80/bwd/fused/products.cuh"
#include "cuda/sm80/bwd/fused/row_sums.cuh"
#include "cuda/sm80/bwd/fused/scores.cuh"
#include "cuda/sm80/bwd/fused/turn.cuh"
#include "numerics/octaves.h"

namespace sagebwd::cuda::sm80::fused_backward {

/// Does `use`. kApart: in a loop that never repeats, or the compiler would mix it with what comes
/// before and after, which takes more registers.
template <bool kApart, Config kConfig, class Use>
__device__ void apart(const Thread<kConfig>& me, Use use) {
  do use();
  while (kApart && me.walk().zero != 0);
}

/// What a thread keeps from tile to tile. One object, because apart the compiler puts its parts
/// into registers too early and then finds an order of address arithmetic that needs more of them.
template <typename T, Config kConfig>
struct State {
  Thread<kConfig> me;
  KeyOperands<kConfig> keys;
  Accumulators<kConfig> sums;
  QueryLoads<T, kConfig> loads;

  __device__ State(uint8_t* memory, const BackwardParams& p) : me(p, memory), loads(me) {}
};

template <typename T, Config kConfig>
__device__ __forceinline__ void fused(const BackwardParams& p, uint8_t* memory) {
  constexpr CodeGeneration kChoices = kCode<kConfig>;
  constexpr int kAhead = kConfig.ahead();
  constexpr bool kOnePlace = kConfig.one_place, kOneBack = kConfig.backs == 1 && !kOnePlace;
  static_assert(!(kOnePlace && kChoices.mixes_tiles));
  static_assert(!kConfig.lists() || (kAhead == 1 && !kOnePlace));
  using Back = typename SharedPlan<kConfig>::Back;
  const WalkOf<kConfig> own_walk = walk_of<kConfig>(p, Place<kConfig>::take(p, memory));
  if (own_walk.has_no_keys()) return;  // the padding of a sequence

  State<T, kConfig> state(memory, p);
  auto& [me, keys, sums, loads] = state;
  Starts<kConfig>::reset(me);
  Turns<kConfig>::reset(me);
  if (me.index == 0)
    at<WalkOf<kConfig>>(me.shared + offsetof(SharedPlan<kConfig>, walk)) = own_walk;
  load_keys<T>(me, own_walk);
  Scales<kConfig>::reset(me, 0), Scales<kConfig>::reset(me, 1);
  const WalkOf<kConfig>& walk = kChoices.walk_in_shared ? me.walk() : own_walk;
  if constexpr (kConfig.has_dq_keys())
    if (me.index == 0) {
      const int64_t before = numerics::octave_of_block(own_walk.key0 / kBlock) * (p.h * p.tq);
      if constexpr (kConfig.capped())
        me.of_octave() = p.q_centre_logit + before;
      else
        me.of_octave() = p.q_exponent + before;
      me.gradients() = p.q_gradient + (p.v_scale != nullptr ? before : 0);
    }
  if constexpr (kChoices.walk_in_shared || kConfig.has_dq_keys()) __syncthreads();
  DqDither<kConfig>::start(me, own_walk);

  int left = own_walk.steps;          // tiles from `now` on
  int head = own_walk.first_head(p);  // of `next`, the tile that is loaded next
  Tile now = own_walk.first_tile(p, head), next = now;
  if constexpr (kConfig.lists())
    if (me.index == 0) at<Tile>(me.listed_at(left)) = now, me.list_end() = own_walk.list_end(p);
  loads.start_head(me, own_walk.s, head, own_walk.first);
  const auto advance = [&](Tile& t) { return walk.template advance<kConfig>(t); };
  // The tile that comes `count` tiles after the one of this round, for a loop that has advanced so
  // far. Lists have it in shared memory.
  const auto tile_after = [&](int count) -> Tile {
    if constexpr (kConfig.lists())
      return at<Tile>(me.listed_at(left - count));
    else
      return now;
  };
  const auto hide_masked = [&](Scores& x, int count) {
    const Tile tile = tile_after(count);
    if (walk.needs_mask(tile)) hide(x, me, tile.query);
  };
  // Starts loading the tile that comes `ahead` tiles after `now`; behind the last, nothing.
  const auto load_next = [&](int ahead, int stage, bool with_back) {
    if constexpr (kConfig.lists()) {
      if (left > ahead) {
        const Tile tile = ahead == 0 ? next : tile_after(ahead);
        loads.load_front(me, walk, stage, tile);
        if (with_back) loads.load_back(me, stage, tile.row);
        const int behind = left - ahead - 1;  // the one after it is needed in the next round
        if (me.index == 0 && behind > 0)
          arch::cp_async_8(me.listed_at(behind), me.list_end() - behind);
      }
    } else if (left > ahead) {
      loads.load_front(me, walk, stage, next);
      if (with_back) loads.load_back(me, stage, next.row);
      if (advance(next) && left > ahead + 1) loads.start_head(me, walk.s, ++head, walk.first);
    }
    arch::cp_async_commit();
  };
  load_next(0, 0, !kOnePlace);
  if constexpr (kAhead == 2) load_next(1, 1, true);
  int stage = 0;
  arch::cp_async_wait<kAhead - 1>();
  __syncthreads();  // the keys and the first tile are there
  keys.hold(me);
  Scores prob;
  if (left > 0) {
    probabilities(prob, me, keys, stage);
    hide_masked(prob, 0);
  }
  for (; left > 0; --left) {
    me.renew_addresses();
    const Scales<kConfig> scales{me, me.maxima_at(left & 1), me.tile_scales_at(left & 1)};
    TileCodes codes;
    bool poisoned = false;
    {
      Scores y;
      float row_sum;
      gradients<T>(y, prob, me, keys, stage, row_sum);
      hide_masked(y, 0);
      RowSums<kConfig>::share(me, y, row_sum, left & 1);
      scales.share(prob, y, p.p_unit);
      __syncthreads();  // the scales are there, and S and dP have read the tile
      if constexpr (kOnePlace) {
        loads.load_back(me, 0, now.row);
        arch::cp_async_commit();
      } else {
        load_next(kAhead, kConfig.stage_before(stage), !kOneBack);
      }
      Scales<kConfig>::reset(me, (left + 1) & 1);
      poisoned = !(scales.p_is_finite() && scales.ds_is_finite());
      if (poisoned) scales.part_poisoned(left & 1, prob, y, p.p_unit);
      scales.make_codes(codes, prob, y, left);
    }
    arch::cp_async_wait<kAhead - 1>();
    __syncthreads();  // the codes of all warps are there, and so is the next tile
    Turns<kConfig>::pass(me);
    Starts<kConfig>::settle(sums, me, left);
    const uint32_t back = me.back_at(stage);
    const Tile done = tile_after(0);
    if constexpr (!kConfig.lists()) advance(now);
    stage = kConfig.stage_after(stage);

    const auto make_dq = [&] {
      Turns<kConfig>::wait(me, done);
      add_to_dq(done.row, me, codes.query, scales.of_queries(poisoned));
      // `left` inside the lambda changes the order of other instructions even if nothing uses it.
      if constexpr (kConfig.general()) RowSums<kConfig>::add(me, done, left & 1);
    };
    if constexpr (kChoices.dq_early) make_dq();
    // S and P of the next tile. Behind the last this works on what lies there, to no effect.
    if constexpr (kChoices.mixes_tiles) probabilities(prob, me, keys, stage);
    if constexpr (kChoices.dq_first) make_dq();
    apart<kChoices.dv_apart>(me, [&] {
      add_to_dv(sums, me, codes, scales.of_p(poisoned), back + offsetof(Back, do8t));
    });
    apart<kChoices.dk_apart>(me, [&] {
      add_to_dk(sums, me, codes, scales.of_ds(poisoned), back + offsetof(Back, q8t));
    });
    if constexpr (kOneBack) {
      __syncthreads();  // dV and dK have read the tile
      if (left > 1) loads.load_back(me, 0, tile_after(1).row);
      arch::cp_async_commit();
    }
    if constexpr (!kChoices.dq_first && !kChoices.dq_early) make_dq();
    if constexpr (kOnePlace) {
      __syncthreads();  // the products have read the tile and the codes
      load_next(1, 0, false);
      arch::cp_async_wait<0>();
      __syncthreads();  // what S and dP read of the next tile is there
    }
    Starts<kConfig>::count(me, scales.maxima, left);
    DqDither<kConfig>::draw(me, left - 1);  // here there are registers for it
    if (kChoices.mixes_tiles || left > 1) {
      if constexpr (!kChoices.mixes_tiles) probabilities(prob, me, keys, stage);
      hide_masked(prob, 1);
    }
  }
  Turns<kConfig>::pass(me);
  arch::cp_async_wait<0>();
  Starts<kConfig>::settle_last(sums, me);
  if constexpr (kConfig.lists())
    if (me.walk().cut() >= 0) return store_cut(sums, me);
  store_dv<T>(sums, me);
  store_dk<T>(sums, me);
}

/// Shared memory of a multiprocessor that an instance takes.
template <Config kConfig>
inline constexpr int kMemory = arch::shared_memory_for(sizeof(SharedPlan<kConfig>),
                                                       kConfig.resident);

}  // namespace sagebwd::cuda::sm80::fused_backward

namespace sagebwd::cuda::sm80 {

/// kLarger: memory of the instance that is taken instead where it fits; 0: there is none.
template <typename T, fused_backward::Instance kInstance, unsigned kWants, int kLarger>
__global__ void __launch_bounds__(
    fused_backward::config_of(kInstance, kWants).threads(),
    fused_backward::kResident<fused_backward::config_of(kInstance, kWants)>)
    fused_kernel(const __grid_constant__ BackwardParams p) {
  constexpr fused_backward::Config kConfig = fused_backward::config_of(kInstance, kWants);
  extern __shared__ __align__(128) uint8_t memory[];
  if constexpr (arch::runs_here(fused_backward::kMemory<kConfig>, kLarger) &&
                ((kConfig.general() && !kConfig.dithers_dq()) || arch::kIsHopper) &&
                (!kConfig.capped() || arch::caps(kConfig.d)))
    fused_backward::fused<T, kConfig>(p, memory);
}

}  // namespace sagebwd::cuda::sm80
