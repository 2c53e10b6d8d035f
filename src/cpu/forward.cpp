// SPDX-License-Identifier: Apache-2.0
// Forward: one work item is a block of queries of one head. It walks over the key tiles it can see,
// with the online softmax state and Oᵀ in scratch memory.
#include "cpu/forward.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>

#include "cpu/keys.h"
#include "cpu/plan.h"
#include "cpu/queries.h"
#include "cpu/walk.h"
#include "numerics/quantize.h"

namespace sagebwd::cpu {
namespace {

constexpr float kInf = std::numeric_limits<float>::infinity();

/// Scratch of one slot.
struct Scratch {
  void* s = nullptr;                                                    // [bk][bq]
  void* p8 = nullptr;                                                   // [bk][bq]
  float* ot = nullptr;                                                  // [vl][bq]
  float *m = nullptr, *l = nullptr, *alpha = nullptr, *beta = nullptr;  // [bq]
  float* logit_max = nullptr;                                           // [bq]
  float *l_before = nullptr, *gained = nullptr;  // [bq] l where the octave began, and since then
  int32_t *begin = nullptr, *end = nullptr;      // [bq]
  float* bias = nullptr;                         // [bk]
};

struct Buffers {
  Buffers(Plan& plan, Arena& arena);
  KeyData keys;
  QueryBlock query;  // one per slot
  QueryScratch query_scratch;
  Scratch scratch;                // of slot 0; the others follow
  float* ones = nullptr;          // [bk] key scales when S is lifted
  float* dither_query = nullptr;  // [bq]
  float* block_max = nullptr;     // [h][q_blocks]

  Scratch scratch_at(const Plan& plan, int64_t slot) const {
    Scratch t = scratch;
    const int64_t tile = static_cast<int64_t>(plan.bk) * plan.bq;
    t.s = static_cast<float*>(t.s) + slot * tile;
    t.p8 = static_cast<int8_t*>(t.p8) + slot * tile;
    t.ot += slot * plan.vl * plan.bq;
    for (float** x : {&t.m, &t.l, &t.alpha, &t.beta, &t.logit_max, &t.l_before, &t.gained})
      *x += slot * plan.bq;
    t.begin += slot * plan.bq;
    t.end += slot * plan.bq;
    t.bias += slot * plan.bk;
    return t;
  }
};

/// Leading entries of a list whose P is not quantised, or the largest number if no P is.
int64_t unquantised_tiles(const spec::Problem& p) {
  const bool all = p.lead() < 0 || p.lifted(kMatmulO);
  return all ? std::numeric_limits<int64_t>::max() : p.lead();
}

Buffers::Buffers(Plan& plan, Arena& arena) {
  const spec::Problem& p = plan.p;
  plan.place_tables(arena);
  keys.place(arena, plan,
             {.k8t = false,
              .v8t = true,
              .k_float = p.lifted(kMatmulS) || p.recipe.smooth_q,
              .kt_float = false,
              .v_rows = false,
              .vt_rows = unquantised_tiles(p) > 0});  // any tile may lead a list
  query.place(arena, plan, plan.slots, p.lifted(kMatmulS));
  query_scratch.place(arena, plan);
  const int64_t tile = static_cast<int64_t>(plan.bk) * plan.bq;
  scratch.s = arena.take<float>(plan.slots * tile);
  scratch.p8 = arena.take<int8_t>(plan.slots * tile);
  scratch.ot = arena.take<float>(static_cast<int64_t>(plan.slots) * plan.vl * plan.bq);
  for (float** x : {&scratch.m, &scratch.l, &scratch.alpha, &scratch.beta, &scratch.logit_max,
                    &scratch.l_before, &scratch.gained})
    *x = arena.take<float>(static_cast<int64_t>(plan.slots) * plan.bq);
  scratch.begin = arena.take<int32_t>(static_cast<int64_t>(plan.slots) * plan.bq);
  scratch.end = arena.take<int32_t>(static_cast<int64_t>(plan.slots) * plan.bq);
  scratch.bias = arena.take<float>(static_cast<int64_t>(plan.slots) * plan.bk);
  ones = arena.take<float>(plan.bk);
  dither_query = arena.take<float>(plan.bq);
  block_max = arena.take<float>(p.h * plan.q_blocks);
}

/// One forward call.
struct Forward {
  const isa::Kernels& kernels;
  const Plan& plan;
  const ForwardArgs& a;
  const Buffers& buffers;

  void query_block(int64_t slot, int64_t item) const;
  void scores(const QueryBlock& q, int64_t key_at, int keys, const Scratch& t) const;
  void values(const Block& qb, const Block& kb, int64_t hk, int64_t key_at, const Scratch& t,
              const isa::ForwardTile& tile) const;
  void poisoned_values(const Block& qb, const Block& kb, int64_t hk, const Scratch& t) const;
  void mark_rows(const Block& qb, const Block& kb, int64_t key_at, const Scratch& t) const;
  void end_octave(const float* centre, const Scratch& t) const;
  void finish(const Block& qb, int64_t h, int64_t item, const Scratch& t,
              const QueryScratch& q) const;
};

/// Sᵀ of one tile, as integers, or as FP32 when lifted.
void Forward::scores(const QueryBlock& q, int64_t key_at, int keys, const Scratch& t) const {
  if (plan.p.lifted(kMatmulS)) {
    kernels.store_f32({keys, plan.bq, plan.dl, buffers.keys.k_float + key_at * plan.bk * plan.dl,
                       plan.dl, q.qt_float, plan.bq},
                      static_cast<float*>(t.s), plan.bq);
    return;
  }
  kernels.store_ss({keys, plan.bq, plan.dk, buffers.keys.k8 + key_at * plan.bk * plan.dk, plan.dk,
                    q.q8, kernels.flip != 0 ? q.start : nullptr},
                   static_cast<int32_t*>(t.s), plan.bq);
}

/// A tile whose values hold NaN or Inf: a plain loop over visible pairs, so that masked ones stay
/// out.
void Forward::poisoned_values(const Block& qb, const Block& kb, int64_t hk,
                              const Scratch& t) const {
  const int d = static_cast<int>(plan.p.dv);
  const float* p = static_cast<const float*>(t.s);
  float v[256];
  for (int i = 0; i < plan.bq; ++i)
    for (int c = 0; c < d; ++c) t.ot[c * plan.bq + i] *= t.alpha[i];
  for (int j = 0; j < kb.rows; ++j) {
    kernels.load_rows(a.v.dtype, row_at(a.v, kb.seq.batch, hk, kb.seq.k_begin + kb.first + j), 0, 1,
                      d, v, d);
    for (int i = 0; i < qb.rows; ++i) {
      const spec::KeyRange r = plan.p.visible(qb.seq, qb.first + i);
      if (kb.first + j < r.begin || kb.first + j >= r.end) continue;
      const float weight = p[j * plan.bq + i] * t.beta[i];
      for (int c = 0; c < d; ++c) t.ot[c * plan.bq + i] += weight * v[c];
    }
  }
}

/// Rows that see a value which holds NaN or Inf become NaN, and no other row learns of it. The
/// value's codes are 0.
void Forward::mark_rows(const Block& qb, const Block& kb, int64_t key_at, const Scratch& t) const {
  for (int j = 0; j < kb.rows; ++j) {
    if (!std::isnan(buffers.keys.v_scale[key_at * plan.bk + j])) continue;
    for (int i = 0; i < qb.rows; ++i) {
      const spec::KeyRange r = plan.p.visible(qb.seq, qb.first + i);
      if (kb.first + j < r.begin || kb.first + j >= r.end) continue;
      for (int c = 0; c < plan.vl; ++c)
        t.ot[c * plan.bq + i] = std::numeric_limits<float>::quiet_NaN();
    }
  }
}

/// Oᵀ = Oᵀ·alpha + Vᵀ·Pᵀ·beta
void Forward::values(const Block& qb, const Block& kb, int64_t hk, int64_t key_at, const Scratch& t,
                     const isa::ForwardTile& tile) const {
  const KeyData& keys = buffers.keys;
  const int64_t at = key_at * plan.bk * plan.vl;
  const bool folds = spec::folds_v(plan.p.recipe);
  if (keys.v_poisoned[key_at] && !folds) {
    poisoned_values(qb, kb, hk, t);
    return;
  }
  // A scale of V that is not folded into P, and the levels of P, are left to multiply.
  const bool block_scale = !folds && !plan.p.lifted(kMatmulO);
  const float unit =
      (block_scale ? keys.v_scale[key_at * plan.bk] : 1.0f) / (tile.p_float ? 1.0f : plan.p_levels);
  for (int i = 0; i < plan.bq; ++i) t.beta[i] *= unit;
  if (tile.p_float) {
    kernels.blend_f32({plan.vl, plan.bq, tile.tile_k, keys.vt_rows + at, plan.bk,
                       static_cast<const float*>(t.s), plan.bq},
                      t.alpha, t.beta, t.ot, plan.bq);
  } else {
    kernels.blend_su({plan.vl, plan.bq, tile.tile_k, keys.v8t + at, plan.bk, t.p8, nullptr},
                     t.alpha, t.beta, t.ot, plan.bq);
  }
  if (keys.v_poisoned[key_at]) mark_rows(qb, kb, key_at, t);
}

/// What the octave's codes of V lack of O: its centre, or null, times the sum of P over it. A row
/// that saw no key of the octave has kept its sum to the bit, and O stays as it is.
void Forward::end_octave(const float* centre, const Scratch& t) const {
  for (int i = 0; i < plan.bq; ++i) t.gained[i] = t.l[i] - t.l_before[i];
  if (centre != nullptr)
    kernels.add_f32({plan.vl, plan.bq, 1, centre, 1, t.gained, plan.bq}, t.ot, plan.bq);
  std::copy_n(t.l, plan.bq, t.l_before);
}

void Forward::query_block(int64_t slot, int64_t item) const {
  const int64_t h = item / plan.q_blocks;
  // Blocks with the most keys first (a causal mask gives the last ones most), so that no thread
  // ends late.
  const int64_t block = plan.q_blocks - 1 - item % plan.q_blocks;
  const Block qb = plan.query_block(block);
  const int64_t hk = h / plan.p.group();
  const Scratch t = buffers.scratch_at(plan, slot);
  const QueryBlock q = buffers.query.at(plan, slot);
  const QueryScratch qs = buffers.query_scratch.at(plan, slot);
  const bool lifted = plan.p.lifted(kMatmulS);
  prepare_queries(kernels, plan, a, buffers.keys, qb, h, q, qs);

  std::fill(t.m, t.m + plan.bq, -kInf);
  std::fill(t.l, t.l + plan.bq, 0.0f);
  std::fill(t.l_before, t.l_before + plan.bq, 0.0f);
  std::fill(t.logit_max, t.logit_max + plan.bq, -kInf);
  std::fill(t.ot, t.ot + static_cast<int64_t>(plan.vl) * plan.bq, 0.0f);
  const int64_t unquantised = unquantised_tiles(plan.p);
  const float* centre = nullptr;  // of V in the octave of the last tile
  walk_keys(plan, h, qb).for_each([&](int64_t tile_k, int64_t place) {
    const int64_t key_block = plan.k_start[qb.sequence] + tile_k;
    const int64_t key_at = hk * plan.k_blocks + key_block;
    const Block kb = plan.key_block(key_block);
    const float* next = buffers.keys.v_centre(plan, qb.sequence, hk,
                                              numerics::octave_of_block(kb.first / kKeysPerScale));
    if (next != centre) end_octave(centre, t);
    centre = next;
    const int keys = keys_in_use(plan, qb, kb);
    scores(q, key_at, keys, t);
    const bool masked = visible_in_tile(plan, qb, kb, t.begin, t.end);
    const bool smooth_q = plan.p.recipe.smooth_q && !lifted;
    if (smooth_q)
      mean_query_logits(plan, q.mean, buffers.keys.k_float + key_at * plan.bk * plan.dl, t.bias);
    const bool dither = plan.p.recipe.dithers(kMatmulO);
    const isa::ForwardTile tile{
        .tile_q = plan.bq,
        .tile_k = keys,
        .s = t.s,
        .s_is_float = lifted,
        .k_scale = lifted ? buffers.ones : buffers.keys.k_scale + key_at * plan.bk,
        .logit_factor = q.logit_factor,
        .bias = smooth_q ? t.bias : nullptr,
        .shift = q.shift_of(plan, kb.first),
        .cap = numerics::softcap_of(plan.p.softcap),
        .begin = masked ? t.begin : nullptr,
        .end = masked ? t.end : nullptr,
        .v_log2 = buffers.keys.v_log2 + key_at * plan.bk,
        .v_inverse = buffers.keys.v_inverse + key_at * plan.bk,
        .m = t.m,
        .l = t.l,
        .logit_max = a.max_logit != nullptr ? t.logit_max : nullptr,
        .alpha = t.alpha,
        .beta = t.beta,
        .p_float = place < unquantised || (plan.paper() && buffers.keys.v_poisoned[key_at] != 0),
        .p8 = t.p8,
        .p_levels = plan.p_levels,
        .dither_query = dither ? buffers.dither_query : nullptr,
        .dither_u = dither ? numerics::dither_uniform(plan.p.recipe.seed, qb.sequence, h, qb.index,
                                                      tile_k, numerics::DitherOperand::p_forward)
                           : 0.0f};
    kernels.forward_tile(tile);
    for (int i = 0; i < plan.bq; ++i) t.l_before[i] *= t.alpha[i];
    values(qb, kb, hk, key_at, t, tile);
  });
  end_octave(centre, t);
  finish(qb, h, h * plan.q_blocks + block, t, qs);
}

/// Normalises, and writes O, LSE and the block's largest logit.
void Forward::finish(const Block& qb, int64_t h, int64_t item, const Scratch& t,
                     const QueryScratch& q) const {
  double largest = -std::numeric_limits<double>::infinity();
  bool poisoned = false;
  for (int i = 0; i < qb.rows; ++i) {
    const bool empty = t.l[i] == 0.0f;
    t.alpha[i] = empty ? 0.0f : 1.0f / t.l[i];
    const double shift = plan.p.capped() ? 0.0 : q.shift[i];  // capped logits have it already
    const double max_logit = numerics::kLn2 * static_cast<double>(t.logit_max[i]) + shift;
    const double lse = numerics::kLn2 * static_cast<double>(t.m[i]) + shift +
                       std::log(static_cast<double>(t.l[i]));
    *stat_at(a.lse, qb.seq.batch, h, qb.seq.q_begin + qb.first + i) =
        empty ? -kInf : static_cast<float>(lse);
    poisoned = poisoned || std::isnan(t.l[i]);
    if (!empty && max_logit > largest) largest = max_logit;
  }
  buffers.block_max[item] =
      poisoned ? std::numeric_limits<float>::quiet_NaN() : static_cast<float>(largest);
  kernels.transpose_f32(t.ot, plan.bq, plan.vl, plan.bq, q.rows, plan.vl);
  for (int i = 0; i < qb.rows; ++i) {
    float* row = q.rows + static_cast<int64_t>(i) * plan.vl;
    for (int c = 0; c < plan.vl; ++c) row[c] *= t.alpha[i];
  }
  if (a.o.dtype == Dtype::f16)
    for (int64_t n = 0; n < static_cast<int64_t>(qb.rows) * plan.vl; ++n)
      q.rows[n] = numerics::within_f16(q.rows[n]);
  kernels.store_rows(a.o.dtype, row_at(a.o, qb.seq.batch, h, qb.seq.q_begin + qb.first),
                     a.o.stride[2], qb.rows, static_cast<int>(plan.p.dv), q.rows, plan.vl, 1.0f);
}

void reduce_max_logit(const Plan& plan, const Buffers& buffers, float* out) {
  for (int64_t t = 0; t < plan.num_sequences; ++t)
    for (int64_t h = 0; h < plan.p.h; ++h) {
      float largest = -kInf;
      for (int64_t b = plan.q_start[t]; b < plan.q_start[t + 1]; ++b) {
        const float x = buffers.block_max[h * plan.q_blocks + b];
        if (!(x <= largest)) largest = x;  // also takes a NaN
        if (std::isnan(largest)) break;
      }
      out[t * plan.p.h + h] = largest;
    }
}

}  // namespace

size_t forward_workspace(const isa::Kernels& kernels, const spec::Problem& p) {
  Plan plan(p, kernels);
  Arena arena(nullptr);
  Buffers buffers(plan, arena);
  return arena.used();
}

void forward(const isa::Kernels& kernels, const spec::Problem& p, const ForwardArgs& a,
             void* workspace) {
  Plan plan(p, kernels);
  Arena arena(workspace);
  Buffers buffers(plan, arena);
  plan.fill_tables();
  std::fill(buffers.ones, buffers.ones + plan.bk, 1.0f);
  for (int i = 0; i < plan.bq; ++i) buffers.dither_query[i] = numerics::dither_query_term(i);
  prepare_keys(kernels, plan, a, buffers.keys);
  const Forward call{kernels, plan, a, buffers};
  run_items(a.parallel_for, plan, p.h * plan.q_blocks,
            [&](int64_t slot, int64_t item) { call.query_block(slot, item); });
  if (a.max_logit != nullptr) reduce_max_logit(plan, buffers, a.max_logit);
}

}  // namespace sagebwd::cpu
