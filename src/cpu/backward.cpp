// SPDX-License-Identifier: Apache-2.0
// Backward. Four phases: the key side (keys.cpp), the query side, the tiles, and the sum of the
// partial dQ.
//
// A chunk of the tile phase is every `chunks`-th key block of one key head: dK and dV of a block
// stay in scratch memory while it walks over all query blocks of the head's group, and dQ is added
// to a partial sum that belongs to the chunk. The number of chunks follows from the heads and the
// length alone and partial sums are added in their order, so the result depends neither on the
// number of threads nor on the batch. A work item is one chunk where heads are few, and has its
// partial sum until the end; with many heads it is all chunks of a head, and adds them up itself.
#include "cpu/backward.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>

#include "cpu/keys.h"
#include "cpu/plan.h"
#include "cpu/queries.h"
#include "cpu/query_sums.h"
#include "cpu/walk.h"
#include "numerics/quantize.h"

namespace sagebwd::cpu {
namespace {

constexpr float kInf = std::numeric_limits<float>::infinity();

/// The gradient side of the query blocks, [h][q_blocks].
struct GradientBlock {
  int8_t* q8_dk = nullptr;      // quads along queries: [dl/16][bq/4][16][4]
  int32_t* dk_start = nullptr;  // [dl] accumulator start of dK
  int8_t* do8 = nullptr;        // quads along queries
  float* do_scale = nullptr;    // [bq]
  float* dot = nullptr;         // [vl][bq] dOᵀ
  bf16* dot_bf16 = nullptr;     // pairs along dv, where plan.dp_bf16
  float* lse2 = nullptr;        // [bq]
  // [bq]: dO·O - dLSE, less dO·centre of V, whose codes dP is made from. Where V has centres, one
  // for each octave of keys.
  float* delta = nullptr;
  float* q_rows = nullptr;   // [bq][dl] when dK is lifted
  float* do_rows = nullptr;  // [bq][vl] when dV is lifted

  void place(Arena& arena, const Plan& plan) {
    const int64_t blocks = plan.p.h * plan.q_blocks;
    const int64_t tile = static_cast<int64_t>(plan.bq) * plan.dl;
    const int64_t value_tile = static_cast<int64_t>(plan.bq) * plan.vl;
    q8_dk = arena.take<int8_t>(blocks * tile);
    dk_start = arena.take<int32_t>(blocks * plan.dl);
    do8 = arena.take<int8_t>(blocks * value_tile);
    do_scale = arena.take<float>(blocks * plan.bq);
    if (plan.dp_bf16)
      dot_bf16 = arena.take<bf16>(blocks * value_tile);
    else
      dot = arena.take<float>(blocks * value_tile);
    lse2 = arena.take<float>(blocks * plan.bq);
    delta = arena.take<float>(blocks * deltas(plan) * plan.bq);
    if (plan.p.lifted(kMatmulDK)) q_rows = arena.take<float>(blocks * tile);
    if (plan.p.lifted(kMatmulDV)) do_rows = arena.take<float>(blocks * value_tile);
  }
  GradientBlock at(const Plan& plan, int64_t block) const {
    const int64_t tile = static_cast<int64_t>(plan.bq) * plan.dl;
    const int64_t value_tile = static_cast<int64_t>(plan.bq) * plan.vl;
    GradientBlock b = *this;
    b.q8_dk += block * tile;
    b.dk_start += block * plan.dl;
    b.do8 += block * value_tile;
    b.do_scale += block * plan.bq;
    if (dot != nullptr) b.dot += block * value_tile;
    if (dot_bf16 != nullptr) b.dot_bf16 += block * value_tile;
    b.lse2 += block * plan.bq;
    b.delta += block * deltas(plan) * plan.bq;
    if (q_rows != nullptr) b.q_rows += block * tile;
    if (do_rows != nullptr) b.do_rows += block * value_tile;
    return b;
  }
  static int deltas(const Plan& plan) { return plan.centres_v() ? plan.octaves : 1; }
  /// That of the octave that these keys lie in.
  const float* delta_of(const Plan& plan, const Block& keys) const {
    if (!plan.centres_v()) return delta;
    return delta + plan.bq * numerics::octave_of_block(keys.first / kKeysPerScale);
  }
};

/// Scratch of one slot.
struct Scratch {
  void* s = nullptr;                                               // [bk][bq]
  float* dp = nullptr;                                             // [bk][bq]
  int8_t *p8 = nullptr, *ds8_key = nullptr, *ds8_query = nullptr;  // [bk][bq]
  int32_t* key_max = nullptr;                                      // [2][bk][16]
  float *p_scale = nullptr, *ds_key_scale = nullptr, *key_sum = nullptr, *bias = nullptr;  // [bk]
  float* ds_query_scale = nullptr;                                                         // [bq]
  int32_t *ds_query_start = nullptr, *begin = nullptr, *end = nullptr;                     // [bq]
  float *dk = nullptr, *dv = nullptr;  // [bk][dl], [bk][vl]

  void place(Arena& arena, const Plan& plan) {
    const int64_t tile = plan.slots * static_cast<int64_t>(plan.bk) * plan.bq;
    s = arena.take<float>(tile);
    dp = arena.take<float>(tile);
    for (int8_t** x : {&p8, &ds8_key, &ds8_query}) *x = arena.take<int8_t>(tile);
    key_max = arena.take<int32_t>(plan.slots * 2 * static_cast<int64_t>(plan.bk) * isa::kPanel);
    for (float** x : {&p_scale, &ds_key_scale, &key_sum, &bias})
      *x = arena.take<float>(static_cast<int64_t>(plan.slots) * plan.bk);
    ds_query_scale = arena.take<float>(static_cast<int64_t>(plan.slots) * plan.bq);
    for (int32_t** x : {&ds_query_start, &begin, &end})
      *x = arena.take<int32_t>(static_cast<int64_t>(plan.slots) * plan.bq);
    dk = arena.take<float>(static_cast<int64_t>(plan.slots) * plan.bk * plan.dl);
    dv = arena.take<float>(static_cast<int64_t>(plan.slots) * plan.bk * plan.vl);
  }
  Scratch at(const Plan& plan, int64_t slot) const {
    const int64_t tile = static_cast<int64_t>(plan.bk) * plan.bq;
    Scratch t = *this;
    t.s = static_cast<float*>(t.s) + slot * tile;
    t.dp += slot * tile;
    for (int8_t** x : {&t.p8, &t.ds8_key, &t.ds8_query}) *x += slot * tile;
    t.key_max += slot * 2 * plan.bk * isa::kPanel;
    for (float** x : {&t.p_scale, &t.ds_key_scale, &t.key_sum, &t.bias}) *x += slot * plan.bk;
    t.ds_query_scale += slot * plan.bq;
    for (int32_t** x : {&t.ds_query_start, &t.begin, &t.end}) *x += slot * plan.bq;
    t.dk += slot * plan.bk * plan.dl;
    t.dv += slot * plan.bk * plan.vl;
    return t;
  }
};

struct Buffers {
  Buffers(Plan& plan, Arena& arena) {
    const spec::Problem& p = plan.p;
    plan.place_tables(arena);
    keys.place(arena, plan,
               {.k8t = true,
                .v8t = false,
                .k_float = p.lifted(kMatmulSRecompute) || p.recipe.smooth_q,
                .kt_float = p.lifted(kMatmulDQ),
                .v_rows = true,
                .vt_rows = false});
    query.place(arena, plan, p.h * plan.q_blocks, p.lifted(kMatmulSRecompute));
    query_scratch.place(arena, plan);
    gradient.place(arena, plan);
    scratch.place(arena, plan);
    ones = arena.take<float>(plan.bk);
    dither_query = arena.take<float>(plan.bq);
    const int64_t parts = plan.partials() * p.h * plan.q_blocks;
    dq = arena.take<float>(parts * plan.dl * plan.bq);
    dq_begun = arena.take<uint8_t>(parts);
    if (p.adds_row_sums()) query_sum = arena.take<float>(parts * plan.bq);
    if (plan.whole_heads && plan.chunks > 1) {
      const int64_t workers = std::min<int64_t>(plan.slots, plan.num_sequences * p.hk);
      const int64_t blocks = workers * p.group() * plan.most_query_blocks;
      chunk_dq = arena.take<float>(blocks * plan.dl * plan.bq);
      chunk_begun = arena.take<uint8_t>(blocks);
      if (p.adds_row_sums()) chunk_query_sum = arena.take<float>(blocks * plan.bq);
    }
  }
  KeyData keys;
  QueryBlock query;  // [h][q_blocks]
  QueryScratch query_scratch;
  GradientBlock gradient;
  Scratch scratch;
  float* ones = nullptr;          // [bk]
  float* dither_query = nullptr;  // [bq]
  float* dq = nullptr;            // [partials][h][q_blocks][dl][bq]
  uint8_t* dq_begun = nullptr;    // [partials][h][q_blocks]
  float* query_sum = nullptr;     // [partials][h][q_blocks][bq] row sums of dS, if added up
  float* chunk_dq = nullptr;      // [slots][group][query blocks][dl][bq] when an item has chunks
  float* chunk_query_sum = nullptr;
  uint8_t* chunk_begun = nullptr;
};

/// One backward call.
struct Backward {
  const isa::Kernels& kernels;
  const Plan& plan;
  const BackwardArgs& a;
  const Buffers& buffers;

  void prepare_block(int64_t slot, int64_t item) const;
  void key_item(int64_t slot, int64_t item) const;
  void key_chunk(int64_t sequence, int64_t hk, int64_t chunk, const QuerySums& sums,
                 const Scratch& t) const;
  void tile(const Block& qb, const Block& kb, int64_t h, const QuerySums& sums,
            const Scratch& t) const;
  void products(const QueryBlock& q, const GradientBlock& g, int64_t key_at, int keys, float* dq,
                const Scratch& t) const;
  void finish_queries(int64_t slot, int64_t item) const;

  /// Gradients of rotated Q or K, made from codes, become those of Q or K.
  void turn_back(Matmul matmul, float* rows, int count) const {
    if (plan.p.recipe.rotate && !plan.p.lifted(matmul))
      kernels.rotate_rows_back(rows, plan.dl, count, static_cast<int>(plan.p.d));
  }
  QuerySums sums_at(int64_t partial, int64_t at) const {
    const QuerySums all{buffers.dq, buffers.query_sum,       buffers.dq_begun, 1,
                        1,          plan.p.h * plan.q_blocks};
    return all.at(plan, partial, at);
  }
};

/// Codes of Q and dO, dOᵀ, and the per-query statistics of one block.
void Backward::prepare_block(int64_t slot, int64_t item) const {
  const int64_t h = item / plan.q_blocks;
  const Block b = plan.query_block(item % plan.q_blocks);
  const QueryBlock q = buffers.query.at(plan, item);
  const QueryScratch scratch = buffers.query_scratch.at(plan, slot);
  const GradientBlock g = buffers.gradient.at(plan, item);
  const int64_t tile = static_cast<int64_t>(plan.bq) * plan.dl;
  const int64_t value_tile = static_cast<int64_t>(plan.bq) * plan.vl;

  prepare_queries(kernels, plan, a, buffers.keys, b, h, q, scratch);
  kernels.pack_along_columns(scratch.codes, plan.dk, plan.bq, plan.dl, g.q8_dk);
  kernels.sum_column_codes(scratch.codes, plan.dk, plan.bq, plan.dl, g.dk_start);
  for (int c = 0; c < plan.dl; ++c) g.dk_start[c] *= -kernels.flip;
  if (g.q_rows != nullptr) std::copy(scratch.rows, scratch.rows + tile, g.q_rows);

  float* rows = scratch.rows;
  float* out = scratch.smooth;
  load_query_rows(kernels, plan, a.dout, b, h, rows, plan.vl);
  load_query_rows(kernels, plan, a.o, b, h, out, plan.vl);
  std::fill(g.lse2, g.lse2 + plan.bq, kInf);
  std::fill_n(g.delta, GradientBlock::deltas(plan) * plan.bq, 0.0f);
  double dot[256], centre_dot[256] = {};  // bq at most
  kernels.row_dots(rows, plan.vl, b.rows, out, plan.vl, dot);
  for (int i = 0; i < b.rows; ++i) {
    const int64_t n = b.seq.q_begin + b.first + i;
    const double lse = static_cast<double>(*stat_at(a.lse, b.seq.batch, h, n));
    // A row without keys has LSE = -inf; +inf makes its P zero.
    if (lse != -std::numeric_limits<double>::infinity())
      g.lse2[i] =
          static_cast<float>((lse - (plan.p.capped() ? 0.0 : scratch.shift[i])) / numerics::kLn2);
    const double dlse =
        plan.p.has_dlse ? static_cast<double>(*stat_at(a.dlse, b.seq.batch, h, n)) : 0.0;
    dot[i] -= dlse;
  }
  const int octaves = plan.centres_v() ? numerics::octaves_of(b.seq.nk) : 1;
  for (int octave = 0; octave < octaves; ++octave) {
    const float* centre = buffers.keys.v_centre(plan, b.sequence, h / plan.p.group(), octave);
    if (centre != nullptr) kernels.row_dots(rows, plan.vl, b.rows, centre, 0, centre_dot);
    for (int i = 0; i < b.rows; ++i)
      g.delta[octave * plan.bq + i] = static_cast<float>(dot[i] - centre_dot[i]);
  }
  if (plan.dp_bf16) {
    // A pair of BF16 values takes the place of four codes.
    auto* pairs = reinterpret_cast<int8_t*>(scratch.smooth);
    const int row_bytes = 2 * plan.vl;
    kernels.store_rows(Dtype::bf16, pairs, plan.vl, plan.bq, plan.vl, rows, plan.vl, 1.0f);
    kernels.pack_along_rows(pairs, row_bytes, plan.bq, row_bytes, g.dot_bf16);
  } else {
    kernels.transpose_f32(rows, plan.vl, plan.bq, plan.vl, g.dot, plan.bq);
  }
  if (g.do_rows != nullptr) std::copy(rows, rows + value_tile, g.do_rows);
  encode_queries(kernels, plan, rows, plan.vl, b.rows, g.do_scale, scratch.codes, plan.vk);
  kernels.pack_along_columns(scratch.codes, plan.vk, plan.bq, plan.vl, g.do8);
}

/// dV, dK and dQ of one tile from its codes (or from FP32 where lifted).
void Backward::products(const QueryBlock& q, const GradientBlock& g, int64_t key_at, int keys,
                        float* dq, const Scratch& t) const {
  const spec::Problem& p = plan.p;
  const bool flip = kernels.flip != 0;
  const int64_t key_tile = key_at * plan.bk * plan.dl;
  if (p.lifted(kMatmulDV))
    kernels.add_f32(
        {keys, plan.vl, plan.bq, static_cast<const float*>(t.s), plan.bq, g.do_rows, plan.vl}, t.dv,
        plan.vl);
  else
    kernels.row_us({keys, plan.vl, plan.bq, t.p8, plan.bq, g.do8, nullptr}, t.p_scale, t.dv,
                   plan.vl);

  if (p.lifted(kMatmulDK)) {
    kernels.add_f32({keys, plan.dl, plan.bq, t.dp, plan.bq, g.q_rows, plan.dl}, t.dk, plan.dl);
  } else {
    kernels.row_ss(
        {keys, plan.dl, plan.bq, t.ds8_key, plan.bq, g.q8_dk, flip ? g.dk_start : nullptr},
        t.ds_key_scale, t.dk, plan.dl);
    if (p.recipe.smooth_q)
      for (int j = 0; j < keys; ++j)
        for (int c = 0; c < plan.dl; ++c) t.dk[j * plan.dl + c] += t.key_sum[j] * q.turned_mean[c];
  }

  if (p.lifted(kMatmulDQ))
    kernels.add_f32(
        {plan.dl, plan.bq, keys, buffers.keys.kt_float + key_tile, plan.bk, t.dp, plan.bq}, dq,
        plan.bq);
  else
    kernels.column_ss({plan.dl, plan.bq, keys, buffers.keys.k8t + key_tile, plan.bk, t.ds8_query,
                       flip ? t.ds_query_start : nullptr},
                      t.ds_query_scale, dq, plan.bq);
}

void Backward::tile(const Block& qb, const Block& kb, int64_t h, const QuerySums& sums,
                    const Scratch& t) const {
  const spec::Problem& p = plan.p;
  const KeyData& data = buffers.keys;
  const int keys = keys_in_use(plan, qb, kb);
  const int64_t at = h * plan.q_blocks + plan.q_start[qb.sequence] + qb.index;
  const int64_t key_at = (h / p.group()) * plan.k_blocks + plan.k_start[kb.sequence] + kb.index;
  const int64_t key_tile = key_at * plan.bk * plan.dl, value_tile = key_at * plan.bk * plan.vl;
  const QueryBlock q = buffers.query.at(plan, at);
  const GradientBlock g = buffers.gradient.at(plan, at);
  const bool lifted = p.lifted(kMatmulSRecompute);
  sums.begin(plan);

  if (lifted)
    kernels.store_f32(
        {keys, plan.bq, plan.dl, data.k_float + key_tile, plan.dl, q.qt_float, plan.bq},
        static_cast<float*>(t.s), plan.bq);
  else
    kernels.store_ss({keys, plan.bq, plan.dk, data.k8 + key_at * plan.bk * plan.dk, plan.dk, q.q8,
                      kernels.flip != 0 ? q.start : nullptr},
                     static_cast<int32_t*>(t.s), plan.bq);
  if (plan.dp_bf16)
    kernels.store_bf16({keys, plan.bq, plan.vl, data.v_bf16 + value_tile, plan.vl, g.dot_bf16},
                       t.dp, plan.bq);
  else
    kernels.store_f32({keys, plan.bq, plan.vl, data.v_rows + value_tile, plan.vl, g.dot, plan.bq},
                      t.dp, plan.bq);

  const bool masked = visible_in_tile(plan, qb, kb, t.begin, t.end);
  const bool smooth_q = p.recipe.smooth_q;
  if (smooth_q && !lifted) mean_query_logits(plan, q.mean, data.k_float + key_tile, t.bias);
  const auto dither = [&](Matmul matmul, numerics::DitherOperand operand) {
    const bool on = p.recipe.dithers(matmul);
    return isa::BackwardTile::Dither{
        on,
        on ? numerics::dither_uniform(p.recipe.seed, qb.sequence, h, qb.index, kb.index, operand)
           : 0.0f};
  };
  const float* k_scale = data.k_scale + key_at * plan.bk;
  kernels.backward_tile({
      .tile_q = plan.bq,
      .tile_k = keys,
      .s = t.s,
      .s_is_float = lifted,
      .dp = t.dp,
      .v_scale = data.v_scale + key_at * plan.bk,
      .k_scale = lifted ? buffers.ones : k_scale,
      .logit_factor = q.logit_factor,
      .bias = smooth_q && !lifted ? t.bias : nullptr,
      .shift = q.shift_of(plan, kb.first),
      .cap = numerics::softcap_of(p.softcap),
      .begin = masked ? t.begin : nullptr,
      .end = masked ? t.end : nullptr,
      .lse2 = g.lse2,
      .delta = g.delta_of(plan, kb),
      .q_scale = q.scale,
      .do_scale = g.do_scale,
      .k_fold = data.k_fold + key_at * plan.bk,
      .per_vector = !plan.paper(),
      .dv_float = p.lifted(kMatmulDV),
      .dq_float = p.lifted(kMatmulDQ),
      .dk_float = p.lifted(kMatmulDK),
      .query_sum = sums.query_sum,
      .sums_what_cap_takes = p.sums_what_cap_takes(),
      .key_sum = smooth_q ? t.key_sum : nullptr,
      .key_max = t.key_max,
      .p8 = t.p8,
      .ds8_key = t.ds8_key,
      .ds8_query = t.ds8_query,
      .p_scale = t.p_scale,
      .ds_key_scale = t.ds_key_scale,
      .ds_query_scale = t.ds_query_scale,
      .ds_query_start = t.ds_query_start,
      .dither_p = dither(kMatmulDV, numerics::DitherOperand::p_backward),
      .dither_ds_query = dither(kMatmulDQ, numerics::DitherOperand::ds_query),
      .dither_ds_key = dither(kMatmulDK, numerics::DitherOperand::ds_key),
      .dither_query = buffers.dither_query,
      .p_levels = plan.p_levels,
  });
  products(q, g, key_at, keys, sums.dq, t);
}

/// All key blocks of one chunk of one key head of one sequence.
void Backward::key_chunk(int64_t sequence, int64_t hk, int64_t chunk, const QuerySums& sums,
                         const Scratch& t) const {
  const int64_t q_begin = plan.q_start[sequence];
  const int64_t h_begin = hk * plan.p.group(), h_end = h_begin + plan.p.group();
  sums.clear(plan);
  for (int64_t k = plan.k_start[sequence] + chunk; k < plan.k_start[sequence + 1];
       k += plan.chunks) {
    const Block kb = plan.key_block(k);
    std::fill_n(t.dk, static_cast<int64_t>(plan.bk) * plan.dl, 0.0f);
    std::fill_n(t.dv, static_cast<int64_t>(plan.bk) * plan.vl, 0.0f);
    for (int64_t h = h_begin; h < h_end; ++h)
      walk_queries(plan, h, kb).for_each([&](int64_t block, int64_t) {
        tile(plan.query_block(q_begin + block), kb, h, sums.at(plan, h - h_begin, block), t);
      });
    const int64_t n = kb.seq.k_begin + kb.first;
    turn_back(kMatmulDK, t.dk, kb.rows);
    kernels.store_rows(a.dk.dtype, row_at(a.dk, kb.seq.batch, hk, n), a.dk.stride[2], kb.rows,
                       static_cast<int>(plan.p.d), t.dk, plan.dl, plan.p.scale);
    kernels.store_rows(a.dv.dtype, row_at(a.dv, kb.seq.batch, hk, n), a.dv.stride[2], kb.rows,
                       static_cast<int>(plan.p.dv), t.dv, plan.vl, 1.0f);
  }
}

/// One chunk, or all of them, of one key head of one sequence.
void Backward::key_item(int64_t slot, int64_t item) const {
  const int64_t partial = item % plan.partials();
  const int64_t hk = item / plan.partials() % plan.p.hk;
  const int64_t sequence = item / plan.partials() / plan.p.hk;
  const Scratch t = buffers.scratch.at(plan, slot);
  QuerySums sums = sums_at(partial, hk * plan.p.group() * plan.q_blocks + plan.q_start[sequence]);
  sums.heads = plan.p.group(), sums.head_step = plan.q_blocks;
  sums.blocks = plan.q_start[sequence + 1] - plan.q_start[sequence];
  key_chunk(sequence, hk, partial, sums, t);
  if (!plan.whole_heads) return;
  const int64_t chunks = std::min<int64_t>(plan.chunks, plan.key_blocks_of(sequence));
  const QuerySums all{buffers.chunk_dq,
                      buffers.chunk_query_sum,
                      buffers.chunk_begun,
                      1,
                      1,
                      sums.heads * plan.most_query_blocks};
  for (int64_t chunk = 1; chunk < chunks; ++chunk) {
    QuerySums own = all.at(plan, slot, 0);
    own.heads = sums.heads, own.blocks = own.head_step = sums.blocks;
    key_chunk(sequence, hk, chunk, own, t);
    sums.add(kernels, plan, own);
  }
}

/// dQ of one query block: partial sums in order, the mean key where rows of dS do not sum to zero,
/// and out.
void Backward::finish_queries(int64_t slot, int64_t item) const {
  const int64_t h = item / plan.q_blocks;
  const Block b = plan.query_block(item % plan.q_blocks);
  const QueryScratch scratch = buffers.query_scratch.at(plan, slot);
  const int64_t used = std::min<int64_t>(plan.partials(), plan.key_blocks_of(b.sequence));
  const int64_t size = static_cast<int64_t>(plan.dl) * plan.bq;
  float* sum = scratch.smooth;  // [dl][bq]
  std::fill(sum, sum + size, 0.0f);
  for (int64_t partial = 0; partial < used; ++partial) {
    const QuerySums part = sums_at(partial, item);
    if (*part.begun) kernels.add_values(part.dq, size, sum);
  }
  kernels.transpose_f32(sum, plan.bq, plan.dl, plan.bq, scratch.rows, plan.dl);
  turn_back(kMatmulDQ, scratch.rows, b.rows);
  const bool lacks_mean = plan.paper() ? plan.p.recipe.smooth_k : !plan.p.lifted(kMatmulDQ);
  if (lacks_mean && (plan.p.adds_row_sums() || plan.p.has_dlse)) {
    const float* mu_k = buffers.keys.mean_k(plan, b.sequence, h / plan.p.group());
    for (int i = 0; i < b.rows; ++i) {
      float row_sum = 0.0f, added = 0.0f;
      for (int64_t partial = 0; partial < used && plan.p.adds_row_sums(); ++partial) {
        const QuerySums part = sums_at(partial, item);
        if (*part.begun) added += part.query_sum[i];
      }
      if (plan.p.partial_kv)
        row_sum = added;
      else if (plan.p.has_dlse &&  // rows without keys have no dS
               std::isfinite(buffers.gradient.at(plan, item).lse2[i]))
        row_sum = *stat_at(a.dlse, b.seq.batch, h, b.seq.q_begin + b.first + i);
      if (plan.p.sums_what_cap_takes()) row_sum -= added;
      for (int c = 0; c < plan.dl; ++c)
        scratch.rows[static_cast<int64_t>(i) * plan.dl + c] += row_sum * mu_k[c];
    }
  }
  kernels.store_rows(a.dq.dtype, row_at(a.dq, b.seq.batch, h, b.seq.q_begin + b.first),
                     a.dq.stride[2], b.rows, static_cast<int>(plan.p.d), scratch.rows, plan.dl,
                     plan.p.scale);
}

}  // namespace

size_t backward_workspace(const isa::Kernels& kernels, const spec::Problem& p) {
  Plan plan(p, kernels);
  Arena arena(nullptr);
  Buffers buffers(plan, arena);
  return arena.used();
}

void backward(const isa::Kernels& kernels, const spec::Problem& p, const BackwardArgs& a,
              void* workspace) {
  Plan plan(p, kernels);
  Arena arena(workspace);
  Buffers buffers(plan, arena);
  plan.fill_tables();
  std::fill(buffers.ones, buffers.ones + plan.bk, 1.0f);
  for (int i = 0; i < plan.bq; ++i) buffers.dither_query[i] = numerics::dither_query_term(i);
  const Backward call{kernels, plan, a, buffers};
  prepare_keys(kernels, plan, a, buffers.keys);
  run_items(a.parallel_for, plan, p.h * plan.q_blocks,
            [&](int64_t slot, int64_t item) { call.prepare_block(slot, item); });
  run_items(a.parallel_for, plan, plan.num_sequences * p.hk * plan.partials(),
            [&](int64_t slot, int64_t item) { call.key_item(slot, item); });
  run_items(a.parallel_for, plan, p.h * plan.q_blocks,
            [&](int64_t slot, int64_t item) { call.finish_queries(slot, item); });
}

}  // namespace sagebwd::cpu
