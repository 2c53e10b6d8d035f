// SPDX-License-Identifier: Apache-2.0
// What lies where in a call's workspace. Shapes are in sm80/params.h.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>

#include "cuda/host/arena.h"
#include "cuda/lists/lists.h"
#include "cuda/quantize/formats.h"
#include "cuda/quantize/quantize.h"
#include "cuda/sm80/plan.h"
#include "cuda/tile/layout.h"
#include "cuda/tile/sequences.h"
#include "spec/problem.h"

namespace sagebwd::cuda::sm80 {

/// Warps that share the channels of dQ, at most.
inline constexpr int kDqParts = 4;

/// Sequences that share the padded tokens evenly. Packed documents count as one.
inline int64_t sequences_apart(const spec::Problem& p) {
  return p.packed() ? 1 : std::max<int64_t>(p.b, 1);
}

/// Pieces that both directions have. Saved codes (sagebwd/codes.h) take the place of some: of means
/// where the backward reads codes, and of row-major codes where those have the same layout.
struct SharedSpace {
  SharedSpace(const spec::Problem& p, const Plan& plan, Arena& arena) {
    const bool forward = p.direction == spec::Direction::forward;
    const bool has_k_mean = forward || !p.has_codes,
               has_v_mean = has_k_mean && (forward || spec::folds_v(p.recipe));
    const int64_t heads = plan.num_sequences * p.hk;
    zeros = arena.take<std::byte>(0);
    const size_t before = arena.used();
    next = arena.take<uint32_t>(1), tickets = arena.take<uint32_t>(1);
    if (has_k_mean) {
      k_arrived = arena.take<uint32_t>(heads);
      k_mean = arena.take<float>(heads * plan.padded_d);
      k_turned = arena.take<float>(heads * plan.padded_d);
    }
    if (has_v_mean) {
      v_arrived = arena.take<uint32_t>(heads);
      v_mean = arena.take<float>(heads * plan.padded_d);
    }
    if (forward) {
      max_logit = arena.take<uint32_t>(plan.num_sequences * p.h);
    } else {
      v_top = arena.take<uint2>(heads);
      k_top = arena.take<uint32_t>(heads);
      if (p.deterministic) turns = arena.take<uint32_t>(p.h * plan.tq / 32 * kDqParts);
      if (p.adds_row_sums()) row_sum = arena.take<float>(p.h * plan.tq);
    }
    zero_bytes = arena.used() - before;
    documents = arena.take<DocumentStart>(p.packed() ? p.documents.count + 1 : 0);
    const int64_t parts = p.hk * plan.k_blocks;
    if (has_k_mean)
      k_part = arena.take<double>(parts * plan.padded_d), k_part_tokens = arena.take<int>(parts);
    if (has_v_mean)
      v_part = arena.take<double>(parts * plan.padded_d), v_part_tokens = arena.take<int>(parts);
    if (!plan.q8_is_saved) q8 = arena.take<int8_t>(p.h * plan.tq * plan.padded_d);
    if (!plan.k8_is_saved) k8 = arena.take<int8_t>(p.hk * plan.tk * plan.padded_d);
    k_scale = arena.take<KeyScale>(p.hk * plan.tk);
    items = arena.take<std::byte>(most_items(p.hk, p.group(), plan.q_blocks, plan.k_blocks) *
                                  kItemBytes);
  }
  std::byte* zeros;  // zero_bytes bytes that a call sets to zero: next … row_sum
  size_t zero_bytes;
  uint32_t *next, *k_arrived = nullptr, *v_arrived = nullptr;
  float *k_mean = nullptr, *k_turned = nullptr, *v_mean = nullptr;
  uint32_t* max_logit = nullptr;
  uint32_t *tickets, *turns = nullptr;
  uint2* v_top = nullptr;  // of sm90, and so is k_top
  uint32_t* k_top = nullptr;
  float* row_sum = nullptr;
  DocumentStart* documents;
  double *k_part = nullptr, *v_part = nullptr;
  int *k_part_tokens = nullptr, *v_part_tokens = nullptr;
  int8_t *q8 = nullptr, *k8 = nullptr;
  KeyScale* k_scale;
  void* items;  // pieces of work of the operand kernel
};

/// Room for the lists of a forward with such tiles.
inline KeyLists take_key_lists(const spec::Problem& p, const Plan& plan, Arena& arena, int tile_q,
                               int tile_k) {
  const int64_t rows = p.h * plan.tq / tile_q;
  KeyLists lists{};
  lists.width = p.blocks.width * (p.blocks.block_k / tile_k);
  lists.key_tiles = plan.tk / tile_k / sequences_apart(p);
  lists.rows = arena.take<ListRow>(rows);
  lists.tiles = arena.take<int32_t>(rows * lists.width + 1);
  lists.bits = arena.take<uint32_t>(rows * lists.words());
  return lists;
}

struct ForwardSpace : SharedSpace {
  ForwardSpace(const spec::Problem& p, const Plan& plan, Arena& arena)
      : SharedSpace(p, plan, arena) {
    v16 = arena.take<uint16_t>(p.hk * plan.tk * plan.padded_d);
    v8t = arena.take<int8_t>(p.hk * plan.tk * plan.padded_d);
    tile_scale = arena.take<TileScale>(p.hk * plan.tk / kSlab);
    if (p.recipe.scheme == Scheme::vectorwise)
      folded = arena.take<FoldedScales>(p.hk * plan.tk / kBlock);
    logit_factor = arena.take<float>(p.h * plan.tq);
    mean_logit = arena.take<float>(p.h * plan.tq);
    if (p.has_lists()) lists = take_key_lists(p, plan, arena, kListedQueries, tiles_of(p).k);
  }
  uint16_t* v16;
  int8_t* v8t;
  TileScale* tile_scale;
  FoldedScales* folded = nullptr;
  float *logit_factor, *mean_logit;
  KeyLists lists = {};
};

struct BackwardSpace : SharedSpace {
  BackwardSpace(const spec::Problem& p, const Plan& plan, Arena& arena)
      : SharedSpace(p, plan, arena) {
    q8t = arena.take<int8_t>(p.h * plan.tq * plan.padded_d);
    k8t = arena.take<int8_t>(p.hk * plan.tk * plan.padded_d);
    do8t = arena.take<int8_t>(p.h * plan.tq * plan.padded_d);
    if (spec::folds_v(p.recipe)) v_scale = arena.take<float>(p.hk * plan.tk);
    v16 = arena.take<uint16_t>(p.hk * plan.tk * plan.padded_d);
    do16 = arena.take<uint16_t>(p.h * plan.tq * plan.padded_d);
    row = arena.take<QueryRow>(p.h * plan.tq);
    exponent = arena.take<QueryExponent>(p.h * plan.tq);
    gradient = arena.take<QueryGradient>(p.h * plan.tq);
    dq_sum = arena.take<float>(p.h * plan.tq * plan.padded_d);
    if (p.capped()) mean_logit = arena.take<float>(p.h * plan.tq);
    if (p.has_lists()) {
      const int64_t rows = plan.tq / kListedQueries;
      lists.tile_k = tiles_of(p).k, lists.group = static_cast<int>(p.group());
      lists.lineups = sequences_apart(p);
      lists.query_tiles = rows / lists.lineups;
      lists.key_tiles = plan.tk / lists.tile_k / lists.lineups;
      lists.places =
          p.group() * lists.query_tiles * p.blocks.width * (p.blocks.block_k / lists.tile_k);
      const int64_t lineups = p.hk * lists.lineups, cuts = lineups * lists.cut_places(),
                    bits = lineups * lists.columns() * lists.words(),
                    starts = lineups * (lists.columns() + 1),
                    row_bits = p.deterministic ? p.h * rows * lists.row_words() : 0;
      lists.zero_words = bits + starts + row_bits;
      lists.bits = arena.take<uint32_t>(lists.zero_words), lists.start = lists.bits + bits;
      if (p.deterministic) lists.row_bits = lists.start + starts;
      lists.entries = arena.take<ListedQueries>(lineups * lists.places);
      lists.pieces = arena.take<Piece>(lineups * lists.piece_places());
      lists.cuts = arena.take<Cut>(cuts);
      lists.cut_count = arena.take<uint32_t>(lineups);
      lists.sums = arena.take<float>(cuts * 2 * lists.tile_k * plan.padded_d);
    }
  }
  int8_t *q8t, *k8t, *do8t;
  uint16_t *v16, *do16;
  float* v_scale = nullptr;
  QueryRow* row;
  QueryExponent* exponent;
  QueryGradient* gradient;
  float* dq_sum;
  float* mean_logit = nullptr;
  QueryLists lists = {};
};

}  // namespace sagebwd::cuda::sm80
