// SPDX-License-Identifier: Apache-2.0
// What lies where in a call's workspace. Shapes are in sm90/params.h.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>

#include "cuda/host/device.h"
#include "cuda/sm90/formats.h"
#include "cuda/sm90/quantize/job.h"
#include "cuda/tuned/workspace.h"
#include "numerics/octaves.h"
#include "spec/codes.h"

namespace sagebwd::cuda::sm90 {

using tuned::Plan;

/// Keys of an entry of a list: of a block of such size, or a part of a block.
inline int listed_keys(const spec::Problem& p) { return p.blocks.block_k % kBlock == 0 ? 128 : 64; }

inline CentreRows take_centre_rows(const spec::Problem& p, const Plan& plan, Arena& arena) {
  const int64_t rows = plan.num_sequences * p.hk * kCentreRows;
  return {arena.take<int8_t>(rows * plan.padded_d), arena.take<float>(rows)};
}

inline CentreColumns take_centre_columns(const spec::Problem& p, const Plan& plan, Arena& arena) {
  const int64_t columns = plan.num_sequences * p.hk * kCentreRows;
  return {arena.take<uint16_t>(columns * plan.padded_d), arena.take<float>(columns)};
}

struct ForwardSpace : tuned::SharedSpace {
  ForwardSpace(const spec::Problem& p, const Plan& plan, Arena& arena)
      : tuned::SharedSpace(p, plan, arena),
        centre_rows(take_centre_rows(p, plan, arena)),
        value_columns(take_centre_columns(p, plan, arena)) {
    items = tuned::take_items(p, plan, arena);
    v8t = arena.take<int8_t>(p.hk * plan.tk * plan.padded_d);
    logit_factor = arena.take<float>(p.h * plan.tq);
    numbers = arena.take<KeyNumbers>(p.hk * plan.tk / kBlock);
    if (p.has_lists()) lists = tuned::take_key_lists(p, plan, arena, kBlock, listed_keys(p));
  }
  CentreRows centre_rows;
  CentreColumns value_columns;
  tuned::Item* items;
  int8_t* v8t;
  float* logit_factor;
  KeyNumbers* numbers;
  KeyLists lists = {};
};

/// Whether dQ is added up in half precision: half as many bytes leave the multiprocessors, which is
/// the largest cost of the backward. Every addition rounds to 11 bits. With up to 256 blocks of
/// keys this error stays far below that of the codes; longer sequences take FP32.
inline bool adds_dq_in_halves(const spec::Problem& p) { return p.nk <= 256 * kBlock; }

/// Which walks of the backward several thread blocks share (bwd/parts.cuh).
struct Parts {
  static constexpr int64_t kMost = 8;  // of a walk: adding them up takes time, too

  /// Few walks: all of them. Many walks of the same length: those that are left for the last round.
  Parts(const spec::Problem& p, const Plan& plan) {
    const int64_t walks = p.hk * plan.k_blocks, places = multiprocessors(),
                  left = walks < places ? walks : walks % places;
    const bool same_length = !p.packed() && p.left < 0 && p.right < 0;
    if (p.deterministic || left == 0 || (walks > places && !same_length)) return;
    // What a thread block does before its first tile and behind its last takes as long as some
    // tiles.
    constexpr int64_t kFewest = 512;  // queries
    const int64_t queries = plan.tq / plan.num_sequences * p.group(),
                  most = std::min({places / left, kMost, queries / kFewest});
    if (most < 2) return;
    parted = static_cast<int>(left), count = static_cast<int>(most);
  }
  int parted = 0, count = 1;

  int64_t done_words() const { return int64_t{2} * parted * count; }
  int64_t sums(int d) const { return int64_t{2} * parted * count * kBlock * d; }
};

/// What a backward without saved codes has beside the rest: it makes them first, as `p`, a forward
/// that saves codes.
struct CodesSpace : tuned::SharedSpace {
  CodesSpace(const spec::Problem& p, const Plan& plan, Arena& arena)
      : tuned::SharedSpace(p, plan, arena),
        centre_rows(take_centre_rows(p, plan, arena)),
        items(tuned::take_items(p, plan, arena)),
        codes(arena.take<std::byte>(spec::codes_layout(p).bytes)) {}
  CentreRows centre_rows;
  tuned::Item* items;
  std::byte* codes;
};

struct BackwardSpace : tuned::SharedSpace {
  BackwardSpace(const spec::Problem& p, const Plan& plan, Arena& arena)
      : tuned::SharedSpace(p, plan, arena, p.h * plan.tq / 16), parts(p, plan) {
    v_top = arena.take<uint32_t>(plan.num_sequences * p.hk);
    k_top = arena.take<uint32_t>(plan.num_sequences * p.hk);
    parts_done = arena.take<uint32_t>(parts.done_words());
    part_sums = arena.take<float>(parts.sums(plan.padded_d));
    q8t = arena.take<int8_t>(p.h * plan.tq * plan.padded_d);
    do8t = arena.take<int8_t>(p.h * plan.tq * plan.padded_d);
    do16 = arena.take<uint16_t>(p.h * plan.tq * plan.padded_d);
    if (!plan.k8_is_saved) {
      v8 = arena.take<int8_t>(p.hk * plan.tk * plan.padded_d);
      k_scale = arena.take<float>(p.hk * plan.tk);
      v_scale = arena.take<float>(p.hk * plan.tk);
    }
    row = arena.take<QueryRow>(p.h * plan.tq);
    stats = arena.take<QueryStats>(p.h * plan.tq / kSlab);
    octave_stats = arena.take<OctaveStats>(numerics::octaves_of(p.nk) * p.h * plan.tq / kSlab);
    dq_mean = arena.take<float>(plan.num_sequences * p.hk * plan.padded_d);
    dq_mean_back = arena.take<float>(plan.num_sequences * p.hk * plan.padded_d);
    dq_lift = arena.take<float>(p.h * plan.tq);
    dq_halves = adds_dq_in_halves(p);
    dq_sum = arena.take<uint16_t>(p.h * plan.tq * plan.padded_d * (dq_halves ? 1 : 2));
  }
  Parts parts;
  uint32_t *v_top, *k_top;
  uint32_t* parts_done;
  float* part_sums;
  int8_t *q8t, *do8t, *v8 = nullptr;
  uint16_t* do16;
  float *k_scale = nullptr, *v_scale = nullptr;
  QueryRow* row;
  QueryStats* stats;
  OctaveStats* octave_stats;
  float *dq_mean, *dq_mean_back;
  float* dq_lift;
  bool dq_halves;
  void* dq_sum;
};

}  // namespace sagebwd::cuda::sm90
