// SPDX-License-Identifier: Apache-2.0
// What lies where in a call's workspace. Shapes are in sm80/params.h.
#pragma once

#include <cstdint>

#include "cuda/host/arena.h"
#include "cuda/lists/lists.h"
#include "cuda/sm80/formats.h"
#include "cuda/sm80/quantize/operands.h"
#include "cuda/sm80/tiles.h"
#include "cuda/tuned/workspace.h"
#include "numerics/octaves.h"
#include "spec/problem.h"

namespace sagebwd::cuda::sm80 {

using tuned::Plan;

/// Warps that share the channels of dQ, at most.
inline constexpr int kDqParts = 4;

/// Pieces that both directions have.
struct SharedSpace : tuned::SharedSpace {
  SharedSpace(const spec::Problem& p, const Plan& plan, Arena& arena)
      : tuned::SharedSpace(p, plan, arena, p.h * plan.tq / 32 * kDqParts),
        k_scale(arena.take<KeyScale>(p.hk * plan.tk)),
        items(tuned::take_items(p, plan, arena)) {}
  KeyScale* k_scale;
  tuned::Item* items;
};

struct ForwardSpace : SharedSpace {
  ForwardSpace(const spec::Problem& p, const Plan& plan, Arena& arena)
      : SharedSpace(p, plan, arena) {
    const bool paper = p.recipe.scheme == Scheme::paper;
    if (paper || p.lifted(kMatmulO) || p.lead() != 0)
      v16 = arena.take<uint16_t>(p.hk * plan.tk * plan.padded_d);
    v8t = arena.take<int8_t>(p.hk * plan.tk * plan.padded_d);
    v_tile_scale = arena.take<float>(p.hk * plan.tk / kSlab);
    if (!paper) {
      folded = arena.take<FoldedScales>(p.hk * plan.tk / kBlock);
      v_scale = arena.take<float>(p.hk * plan.tk);
    }
    logit_factor = arena.take<float>(p.h * plan.tq);
    if (paper) mean_logit = arena.take<float>(p.h * plan.tq);
    if (p.has_lists()) lists = tuned::take_key_lists(p, plan, arena, kListedQueries, tiles_of(p).k);
  }
  uint16_t* v16 = nullptr;
  int8_t* v8t;
  FoldedScales* folded = nullptr;
  float *v_tile_scale, *v_scale = nullptr, *logit_factor, *mean_logit = nullptr;
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
    const bool paper = p.recipe.scheme == Scheme::paper;
    const int64_t octaves = numerics::octaves_of(p.nk);
    exponent = arena.take<QueryExponent>((paper || p.capped() ? 1 : octaves) * p.h * plan.tq);
    if (!paper) {
      dq_keys.scale = arena.take<float>(p.hk * plan.tk / kSlab);
      dq_keys.turned = arena.take<float>(plan.num_sequences * p.hk * plan.padded_d);
      dq_keys.mean = arena.take<float>(plan.num_sequences * p.hk * plan.padded_d);
    }
    gradient = arena.take<QueryGradient>((spec::folds_v(p.recipe) ? octaves : 1) * p.h * plan.tq);
    dq_sum = arena.take<float>(p.h * plan.tq * plan.padded_d);
    if (p.capped()) centre_logit = arena.take<float>(octaves * p.h * plan.tq);
    if (p.has_lists()) {
      const int64_t rows = plan.tq / kListedQueries;
      lists.tile_k = tiles_of(p).k, lists.group = static_cast<int>(p.group());
      lists.lineups = tuned::sequences_apart(p);
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
  DqKeys dq_keys;
  QueryGradient* gradient;
  float* dq_sum;
  float* centre_logit = nullptr;
  QueryLists lists = {};
};

}  // namespace sagebwd::cuda::sm80
