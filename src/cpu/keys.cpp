// SPDX-License-Identifier: Apache-2.0
#include "cpu/keys.h"

#include <algorithm>
#include <cmath>
#include <cstring>

namespace sagebwd::cpu {
namespace {

/// Mean over the tokens that are finite throughout, summed in FP64.
void mean_of(const isa::Kernels& kernels, const Plan& plan, const TensorView& x,
             const spec::Sequence& s, int64_t hk, float* rows, float* mean) {
  double sum[256] = {};
  int64_t count = 0;
  const int d = static_cast<int>(plan.p.d);
  for (int64_t n = 0; n < s.nk; n += plan.bk) {
    const int many = static_cast<int>(std::min<int64_t>(plan.bk, s.nk - n));
    kernels.load_rows(x.dtype, row_at(x, s.batch, hk, s.k_begin + n), x.stride[2], many, d, rows,
                      plan.dl);
    count += kernels.sum_rows(rows, plan.dl, many, d, sum);
  }
  for (int c = 0; c < d && count > 0; ++c)
    mean[c] = static_cast<float>(sum[c] / static_cast<double>(count));
}

void subtract_mean(float* rows, int count, int dl, const float* mean) {
  for (int r = 0; r < count; ++r)
    for (int c = 0; c < dl; ++c) rows[static_cast<int64_t>(r) * dl + c] -= mean[c];
}

/// Loads a block into scratch, padding tokens zero.
void load_block(const isa::Kernels& kernels, const Plan& plan, const TensorView& x, const Block& b,
                int64_t hk, float* rows) {
  kernels.load_rows(x.dtype, row_at(x, b.seq.batch, hk, b.seq.k_begin + b.first), x.stride[2],
                    b.rows, static_cast<int>(plan.p.d), rows, plan.dl);
  std::fill(rows + static_cast<int64_t>(b.rows) * plan.dl,
            rows + static_cast<int64_t>(plan.bk) * plan.dl, 0.0f);
}

void prepare_k(const isa::Kernels& kernels, const Plan& plan, const KeyData& data, int64_t at,
               int rows_used, bool per_token, float* rows, int8_t* codes) {
  const int64_t tile = static_cast<int64_t>(plan.bk) * plan.dl;
  float* scale = data.k_scale + at * plan.bk;
  std::fill(scale, scale + plan.bk, 0.0f);
  std::memset(codes, 0, static_cast<size_t>(plan.bk) * plan.dk);
  kernels.quantize_rows(rows, plan.dl, rows_used, per_token, scale, codes, plan.dk);
  int8_t* k8 = data.k8 + at * plan.bk * plan.dk;
  for (int64_t i = 0; i < static_cast<int64_t>(plan.bk) * plan.dk; ++i)
    k8[i] = static_cast<int8_t>(codes[i] ^ kernels.flip);
  if (data.needs.k8t)
    kernels.transpose_codes(codes, plan.dk, plan.bk, plan.dl, kernels.flip, data.k8t + at * tile,
                            plan.bk);
  if (data.needs.k_float) std::copy(rows, rows + tile, data.k_float + at * tile);
  if (data.needs.kt_float)
    kernels.transpose_f32(rows, plan.dl, plan.bk, plan.dl, data.kt_float + at * tile, plan.bk);
}

void prepare_v8(const isa::Kernels& kernels, const Plan& plan, const KeyData& data, int64_t at,
                int rows_used, float* rows, int8_t* codes) {
  const int64_t tile = static_cast<int64_t>(plan.bk) * plan.dl;
  float scale[256];
  std::memset(codes, 0, static_cast<size_t>(plan.bk) * plan.dk);
  data.v_poisoned[at] =
      kernels.quantize_rows(rows, plan.dl, rows_used, false, scale, codes, plan.dk);
  data.v_scale[at] = data.v_poisoned[at] ? 0.0f : scale[0];
  kernels.transpose_codes(codes, plan.dk, plan.bk, plan.dl, 0, data.v8t + at * tile, plan.bk);
}

}  // namespace

void KeyData::place(Arena& arena, const Plan& plan, const KeyNeeds& n) {
  needs = n;
  const int64_t blocks = plan.p.hk * plan.k_blocks;
  const int64_t tile = static_cast<int64_t>(plan.bk) * plan.dl;
  mu_k = arena.take<float>(plan.num_sequences * plan.p.hk * plan.dl);
  mu_v = arena.take<float>(plan.num_sequences * plan.p.hk * plan.dl);
  k8 = arena.take<int8_t>(blocks * plan.bk * plan.dk);
  k_scale = arena.take<float>(blocks * plan.bk);
  if (n.k8t) k8t = arena.take<int8_t>(blocks * tile);
  if (n.v8t) {
    v8t = arena.take<int8_t>(blocks * tile);
    v_scale = arena.take<float>(blocks);
    v_poisoned = arena.take<uint8_t>(blocks);
  }
  if (n.k_float) k_float = arena.take<float>(blocks * tile);
  if (n.kt_float) kt_float = arena.take<float>(blocks * tile);
  if (n.v_float) v_float = arena.take<float>(blocks * tile);
  if (n.vt_float_tiles > 0) {
    // One place per key block keeps the addressing simple; only the leading tiles are touched.
    vt_float = arena.take<float>(blocks * tile);
  }
  rows = arena.take<float>(plan.slots * tile);
  codes = arena.take<int8_t>(static_cast<int64_t>(plan.slots) * plan.bk * plan.dk);
}

void prepare_keys(const isa::Kernels& kernels, const Plan& plan, const AttentionArgs& a,
                  const KeyData& data) {
  const Recipe& recipe = plan.p.recipe;
  const int64_t tile = static_cast<int64_t>(plan.bk) * plan.dl;

  run_items(a.parallel_for, plan, plan.num_sequences * plan.p.hk, [&](int64_t slot, int64_t item) {
    const spec::Sequence s = plan.p.sequence(item / plan.p.hk);
    const int64_t hk = item % plan.p.hk;
    float* mu_k = data.mu_k + item * plan.dl;
    float* mu_v = data.mu_v + item * plan.dl;
    std::fill(mu_k, mu_k + plan.dl, 0.0f);
    std::fill(mu_v, mu_v + plan.dl, 0.0f);
    float* rows = data.rows + slot * tile;
    if (recipe.smooth_k) mean_of(kernels, plan, a.k, s, hk, rows, mu_k);
    if (recipe.smooth_v && data.needs.v8t) mean_of(kernels, plan, a.v, s, hk, rows, mu_v);
  });

  run_items(a.parallel_for, plan, plan.p.hk * plan.k_blocks, [&](int64_t slot, int64_t at) {
    const int64_t hk = at / plan.k_blocks;
    const Block b = plan.key_block(at % plan.k_blocks);
    float* rows = data.rows + slot * tile;
    int8_t* codes = data.codes + slot * plan.bk * plan.dk;

    load_block(kernels, plan, a.k, b, hk, rows);
    subtract_mean(rows, b.rows, plan.dl, data.mean_k(plan, b.sequence, hk));
    prepare_k(kernels, plan, data, at, b.rows, recipe.scheme == Scheme::vectorwise, rows, codes);

    load_block(kernels, plan, a.v, b, hk, rows);
    if (data.needs.v_float) std::copy(rows, rows + tile, data.v_float + at * tile);
    if (!data.needs.v8t) return;
    subtract_mean(rows, b.rows, plan.dl, data.mean_v(plan, b.sequence, hk));
    prepare_v8(kernels, plan, data, at, b.rows, rows, codes);
    if (b.index < data.needs.vt_float_tiles)
      kernels.transpose_f32(rows, plan.dl, plan.bk, plan.dl, data.vt_float + at * tile, plan.bk);
  });
}

}  // namespace sagebwd::cpu
