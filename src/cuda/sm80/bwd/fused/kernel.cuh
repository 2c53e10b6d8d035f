// SPDX-License-Identifier: Apache-2.0
// dK, dV and dQ in one pass over the scores: one thread block per kTileK keys of a key head,
// looping over tiles of kTileQ queries of its query heads.
//
//                     kTileQ queries →
//                    ┌────┬────┬──        Sᵀ  = K8·Q8ᵀ  (INT8)     P  = 2^(S - LSE)
//   groups of        │ w0 │ w1 │ …        dPᵀ = V·dOᵀ   (16 bit)   dS = P∘(dP - D)
//   32 keys       →  ├────┼────┼──        dV += P8ᵀ·dO8 (INT8)     dK += dS8ᵀ·Q8 (INT8)
//                    │ w2 │ w3 │ …        dQ += dS8·K8  (INT8), added up in global memory
//
// Scores are transposed, so keys are rows: the codes of P and dS are A operands straight from
// registers, because dO8 and Q8 come transposed in the order of the accumulators (tile/codes.cuh).
// The warps of a row above have the same keys and 32 queries each; they hand their codes to each
// other and own a part of the channels of dK and dV each. For dQ the codes are turned around in
// registers, and each warp takes 32 queries and a part of the channels over all keys of the tile.
//
// What is quantised is y = dS·(scale of Q)·(scale of K): codes for dK have one scale per key and
// codes for dQ one per query, so either factor can be taken out again at the very end, and one y
// serves both products.
//
// One round of the loop:
//   dP, y, largest magnitudes → [barrier] → codes → [barrier] → S and P of the next tile, dV, dK,
//   dQ
// Those two barriers also protect the query tiles in shared memory: the next one is loaded behind
// the first barrier, when S and dP of this one are done, and is there at the second. What dV and dK
// read lies there twice, or, where memory is short, is loaded behind a third barrier.
#pragma once

#include <cstddef>
#include <type_traits>

#include "cuda/arch/scalar.cuh"
#include "cuda/arch/target.cuh"
#include "cuda/sm80/bwd/fused/loads.cuh"
#include "cuda/tile/sequence.cuh"
#include "numerics/quantize.h"

namespace sagebwd::cuda::sm80 {

template <typename T, class Shape>
struct FusedBlock : FusedLoads<T, Shape> {
  using Lane = FusedLoads<T, Shape>;
  using Lane::base, Lane::lane, Lane::work, Lane::a8, Lane::b8, Lane::b16, Lane::b_t;
  static constexpr int D = Shape::D, kTileQ = Shape::kTileQ, kTileK = Shape::kTileK;
  static constexpr bool kPaper = Shape::kPaper;
  static constexpr FusedChoices kChoices = kFusedChoices<Shape>;

  __device__ static FusedWork work_of(const BackwardParams& p, int block) {
    FusedWork w;
    w.s = tile::sequence_of_block<kBlock>(p.seq, block * kTileK / kBlock, false);
    w.key0 = static_cast<int>(static_cast<int64_t>(block) * kTileK - w.s.k_pad);
    w.zero = 0;
    w.kv_head = static_cast<int>(blockIdx.y);
    w.band = tile::band_of(p.mask, w.s);
    const int last_key = min(w.key0 + kTileK, w.s.nk) - 1;
    const tile::QueryRange range = tile::visible_to(p.mask, w.s, w.key0, last_key);
    const tile::QueryRange of_first = tile::visible_to(p.mask, w.s, w.key0, w.key0);
    const tile::QueryRange of_last = w.key0 + kTileK <= w.s.nk
                                         ? tile::visible_to(p.mask, w.s, last_key, last_key)
                                         : tile::QueryRange{0, 0};
    const int whole_begin = max(of_first.begin, of_last.begin),
              whole = min(of_first.end, of_last.end) - kTileQ - whole_begin;
    w.whole_begin = whole < 0 ? 0x7fffffff : whole_begin, w.whole = whole < 0 ? 0 : whole;
    w.first = range.begin / kTileQ * kTileQ;
    const int per_head = range.begin < range.end ? (range.end - w.first + kTileQ - 1) / kTileQ : 0;
    w.end = w.first + per_head * kTileQ, w.steps = per_head * p.group;
    w.next_head = static_cast<uint32_t>(p.tq - per_head * kTileQ);
    return w;
  }

  __device__ FusedBlock(const BackwardParams& params, uint8_t* shared, const FusedWork& w)
      : Lane(params, shared) {
    if (this->thread == 0)
      this->template at<FusedWork>(base + offsetof(typename Lane::Shared, work)) = w;
    this->load_keys(w, w.kv_head * params.tk + w.s.k_pad + w.key0);
    if constexpr (kPaper)
      this->reset_tile(0), this->reset_tile(1);
    else
      this->reset(0), this->reset(1);
  }

  /// What follows from these numbers is worked out again in every round of the loop: held in
  /// registers all the time it would push accumulators out of them. A zero that comes from shared
  /// memory keeps the compiler from doing that.
  __device__ void new_round() {
    const uint32_t zero = work().zero;
    if constexpr (kChoices.forgets_keys) a8 += zero;
    if constexpr (kChoices.forgets_transposed) b_t += zero;
    if constexpr (D == 64) {
      b8 += zero, b16 += zero;
    } else {
      const uint32_t in_tile = tile::b_lane<D>((lane() + zero) & 31);
      b8 = kChoices.whole_addresses ? this->first_query8() + in_tile : in_tile;
      // The same row and chunk where rows are twice as long.
      if constexpr (!kPaper) b16 = b8 + ((b8 - (kChoices.whole_addresses ? base : 0)) & ~127u);
    }
  }

  /// Does `use`. kApart: behind a branch that is never taken, or the compiler would mix it with
  /// what comes before and after, which takes more registers.
  template <bool kApart, class Use>
  __device__ void apart(Use use) const {
    do use();
    while (kApart && work().zero != 0);
  }
};

template <typename T, class Shape>
__device__ __forceinline__ void fused(const BackwardParams& p) {
  using Block = FusedBlock<T, Shape>;
  constexpr int kTileQ = Shape::kTileQ, kBacks = Shape::kBacks;
  constexpr bool kPaper = Shape::kPaper;
  extern __shared__ __align__(128) uint8_t memory[];
  // The first keys of a causal sequence have the most queries, and the grid starts with them.
  const FusedWork w = Block::work_of(p, static_cast<int>(blockIdx.x));
  if (w.key0 >= w.s.nk) return;  // the padding of a sequence
  Block b(p, memory, w);

  const FusedWork& work = Block::kChoices.work_in_shared ? b.work() : w;
  if constexpr (Block::kChoices.work_in_shared) __syncthreads();
  /// A tile of queries: the first one's place in the sequence and in the workspace.
  struct Tile {
    int query;
    uint32_t row;
  };
  const auto masked = [&](const Tile& c) {
    return static_cast<uint32_t>(c.query - work.whole_begin) > work.whole;
  };
  int left = w.steps;              // tiles from `now` on
  int head = w.kv_head * p.group;  // of the tile that is loaded next
  Tile now{w.first, static_cast<uint32_t>(head * p.tq + w.s.q_pad + w.first)}, loading = now;
  // Goes on to the next tile; says whether that is of the next head.
  const auto advance = [&](Tile& c) {
    c.query += kTileQ, c.row += kTileQ;
    if (c.query < work.end) return false;
    c.query = work.first, c.row += work.next_head;
    return true;
  };
  b.start_head(w.s, head, w.first);
  // Starts loading the tile that comes `ahead` tiles after `now`; behind the last, nothing.
  const auto load_next = [&](int ahead, int stage, bool back) {
    if (left > ahead) {
      b.load_front(work, stage, loading.row, loading.query);
      if (back) b.load_back(stage, loading.row);
      if (advance(loading) && left > ahead + 1) b.start_head(work.s, ++head, work.first);
    }
    arch::cp_async_commit();
  };

  constexpr int kAhead = kBacks == 3 ? 2 : 1;
  load_next(0, 0, true);
  if constexpr (kAhead == 2) load_next(1, 1, true);
  int stage = 0;
  arch::cp_async_wait<kAhead - 1>();
  __syncthreads();
  b.hold_keys();
  typename Block::Scores prob;
  if (left > 0) {
    b.probabilities(prob, stage);
    if (masked(now)) b.hide(prob, now.query);
  }
  for (; left > 0; --left) {
    b.new_round();
    const uint32_t maxima = b.maxima_at(left & 1);
    typename Block::Codes p_codes, ds_codes;
    typename Block::QueryCodes query_codes;
    [[maybe_unused]] const uint32_t tile_scales = b.tile_scales_at(left & 1);
    [[maybe_unused]] bool poisoned = false;  // `paper`: the tile holds NaN or Inf
    {
      typename Block::Scores y;
      b.gradients(y, prob, stage);
      if (masked(now)) b.hide(y, now.query);
      if constexpr (kPaper) {
        b.share_tile_scales(tile_scales, prob, y, p.p_unit);
      } else {
        b.share_p_scales(maxima + Block::kP, prob, p.p_unit);
        b.share_ds_scales(maxima + Block::kDs, y);
        b.share_query_scales(maxima + Block::kQuery, y);
      }
      __syncthreads();
      load_next(kAhead, stage == 0 ? kBacks - 1 : stage - 1, kBacks > 1);
      if constexpr (kPaper) {
        b.reset_tile((left + 1) & 1);
        const auto scale = [&](int which) {
          return b.template at<float>(tile_scales + 16 * which);
        };
        poisoned = !(numerics::is_finite(scale(0)) && numerics::is_finite(scale(1)));
        if (poisoned) b.part_poisoned(left & 1, prob, y, p.p_unit);
        typename Block::Rows inverse;
        Block::fill(inverse, arch::reciprocal_approx(scale(0)));
        Block::template quantize<tile::Bytes::u8>(p_codes, prob, inverse);
        b.put_codes(Block::kPCodes, p_codes);
        Block::fill(inverse, arch::reciprocal_approx(scale(1)));
        Block::template quantize<tile::Bytes::s8>(ds_codes, y, inverse);
        b.put_codes(Block::kDsCodes, ds_codes);
        b.turn_codes(ds_codes);
      } else {
        b.reset((left + 1) & 1);
        // All at once: one wait for shared memory and reciprocals instead of three.
        typename Block::Rows p_inverse, ds_inverse;
        typename Block::Columns query_inverse;
        b.row_inverses(p_inverse, maxima + Block::kP);
        b.row_inverses(ds_inverse, maxima + Block::kDs);
        b.query_inverses(query_inverse, maxima + Block::kQuery);
        Block::template quantize<tile::Bytes::u8>(p_codes, prob, p_inverse);
        b.put_codes(Block::kPCodes, p_codes);
        Block::template quantize<tile::Bytes::s8>(ds_codes, y, ds_inverse);
        b.put_codes(Block::kDsCodes, ds_codes);
        b.put_query_codes(query_codes, y, query_inverse);
      }
    }
    arch::cp_async_wait<kAhead - 1>();
    __syncthreads();
    if (Block::kWithStart && Block::is_first_of_place(left))
      b.take_starts_off(Block::place_of(left) ^ 1);
    const uint32_t back = Block::back_at(stage), row = now.row;
    advance(now);
    stage = stage + 1 == kBacks ? 0 : stage + 1;
    // S and P of the next tile go with the products, if registers allow. Behind the last tile this
    // works on what lies there, to no effect.
    constexpr bool kMixed = Block::kChoices.mixed;
    if constexpr (kMixed) b.probabilities(prob, stage);
    const auto one_scale = [&] { return kPaper && !poisoned; };
    typename Block::Rows scale;
    const auto make_dq = [&] {
      b.add_queries(row, one_scale() ? tile_scales + 16 : b.query_rows_of(maxima + Block::kQuery),
                    query_codes);
    };
    if constexpr (Block::kChoices.dq_first) make_dq();
    b.template apart<Block::kChoices.dv_apart>([&] {
      b.get_four(scale, one_scale() ? tile_scales : b.rows_of(maxima + Block::kP));
      b.template multiply<tile::Bytes::u8>(b.dv, Block::kPCodes, p_codes, scale,
                                           back + offsetof(typename Block::Back, do8t));
    });
    b.template apart<Block::kChoices.dk_apart>([&] {
      b.get_four(scale, one_scale() ? tile_scales + 16 : b.rows_of(maxima + Block::kDs));
      b.template multiply<tile::Bytes::s8>(b.dk, Block::kDsCodes, ds_codes, scale,
                                           back + offsetof(typename Block::Back, q8t));
    });
    if constexpr (kBacks == 1) {
      __syncthreads();
      if (left > 1) b.load_back(0, now.row);
      arch::cp_async_commit();
    }
    if constexpr (!Block::kChoices.dq_first) b.template apart<Block::kChoices.dq_apart>(make_dq);
    if constexpr (Block::kWithStart) b.count_starts(maxima, left);
    if (kMixed || left > 1) {
      if constexpr (!kMixed) b.probabilities(prob, stage);
      if (masked(now)) b.hide(prob, now.query);
    }
  }
  arch::cp_async_wait<0>();
  if constexpr (Block::kWithStart) {
    __syncthreads();
    b.take_starts_off(0);
  }
  b.finish();
}

/// Shared memory of a multiprocessor that a shape takes.
template <class Shape>
inline constexpr int kFusedMemory = arch::shared_memory_for(sizeof(FusedShared<Shape>),
                                                            Shape::kResident);

/// Larger: the shape that is taken instead where it fits.
template <typename T, class Shape, class Larger>
__global__ void __launch_bounds__(Shape::kThreads, Shape::kResident)
    fused_kernel(const __grid_constant__ BackwardParams p) {
  constexpr int larger = std::is_same_v<Shape, Larger> ? 0 : kFusedMemory<Larger>;
  if constexpr (arch::runs_here(kFusedMemory<Shape>, larger)) fused<T, Shape>(p);
}

}  // namespace sagebwd::cuda::sm80
