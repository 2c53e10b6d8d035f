// SPDX-License-Identifier: Apache-2.0
#include "cpu/keys.h"

#include <algorithm>
#include <cmath>
#include <cstring>

#include "cpu/saved_codes.h"
#include "cpu/scales.h"

namespace sagebwd::cpu {
namespace {

/// Mean over the tokens that are finite throughout, summed in FP64.
void mean_of(const isa::Kernels& kernels, const Plan& plan, const TensorView& x,
             const spec::Sequence& s, int64_t hk, int ld, float* rows, float* mean) {
  double sum[256] = {};
  int64_t count = 0;
  const int d = static_cast<int>(x.shape[3]);
  for (int64_t n = 0; n < s.nk; n += plan.bk) {
    const int many = static_cast<int>(std::min<int64_t>(plan.bk, s.nk - n));
    kernels.load_rows(x.dtype, row_at(x, s.batch, hk, s.k_begin + n), x.stride[2], many, d, rows,
                      ld);
    count += kernels.sum_rows(rows, ld, many, d, sum);
  }
  for (int c = 0; c < d && count > 0; ++c)
    mean[c] = static_cast<float>(sum[c] / static_cast<double>(count));
}

/// The key side of one call, block by block.
struct Preparation {
  const isa::Kernels& kernels;
  const Plan& plan;
  const AttentionArgs& a;
  const KeyData& data;

  void means(int64_t slot, int64_t item) const;
  void block(int64_t slot, int64_t at) const;

 private:
  float* rows_of(int64_t slot) const {
    return data.rows + 2 * slot * plan.bk * static_cast<int64_t>(plan.longest_l());
  }
  int64_t tile() const { return static_cast<int64_t>(plan.bk) * plan.dl; }
  int64_t value_tile() const { return static_cast<int64_t>(plan.bk) * plan.vl; }
  void load(const TensorView& x, const Block& b, int64_t hk, const float* mean, int ld,
            float* rows) const;
  void load_k(const Block& b, int64_t hk, float* rows) const;
  void load_v(const Block& b, int64_t hk, float* rows) const {
    load(a.v, b, hk, data.mean_v(plan, b.sequence, hk), plan.vl, rows);
  }
  void rotate(float* rows, int count) const;
  SavedCodes saved() const { return {plan, a.codes}; }
  void quantize_k(const Block& b, int64_t hk, int64_t at, float* rows, int8_t* codes) const;
  void quantize_v(const Block& b, int64_t hk, int64_t at, float* rows, int8_t* codes) const;
  void finish_k(int64_t at, const int8_t* codes) const;
  void finish_v(const Block& b, int64_t hk, int64_t at, float* rows, const int8_t* codes) const;
  template <typename Load, typename Scale>
  void scale_blocks(const Block& b, int per_scale, float* amax, float* others, int ld,
                    Load load_rows, Scale scale) const;
};

/// Loads a block into scratch with its mean removed, padding tokens zero.
void Preparation::load(const TensorView& x, const Block& b, int64_t hk, const float* mean, int ld,
                       float* rows) const {
  kernels.load_rows(x.dtype, row_at(x, b.seq.batch, hk, b.seq.k_begin + b.first), x.stride[2],
                    b.rows, static_cast<int>(x.shape[3]), rows, ld);
  kernels.subtract_row(rows, ld, b.rows, mean);
  std::fill(rows + static_cast<int64_t>(b.rows) * ld, rows + static_cast<int64_t>(plan.bk) * ld,
            0.0f);
}

void Preparation::load_k(const Block& b, int64_t hk, float* rows) const {
  load(a.k, b, hk, data.mean_k(plan, b.sequence, hk), plan.dl, rows);
}

void Preparation::rotate(float* rows, int count) const {
  if (plan.p.recipe.rotate) kernels.rotate_rows(rows, plan.dl, count, static_cast<int>(plan.p.d));
}

/// Turns the magnitudes of a block's tokens into scales: scale(amax, count, top) for every run of
/// `per_scale` tokens, whose largest magnitude is `top`. Where a run reaches beyond the block,
/// load_rows(block, others) puts its other tokens into `others`, in rows of `ld` values.
template <typename Load, typename Scale>
void Preparation::scale_blocks(const Block& b, int per_scale, float* amax, float* others, int ld,
                               Load load_rows, Scale scale) const {
  const int64_t last = b.first + b.rows;
  for (int64_t begin = b.first / per_scale * per_scale; begin < last; begin += per_scale) {
    const int64_t end = std::min<int64_t>(begin + per_scale, b.seq.nk);
    const int64_t from = std::max(begin, b.first), to = std::min(end, last);
    float* here = amax + (from - b.first);
    float top = largest_finite(here, static_cast<int>(to - from));
    for (int64_t n = begin; n < end; n += plan.bk) {
      if (from == begin && to == end) break;
      if (n == b.first) continue;
      const Block other{b.seq, b.sequence, 0, n,
                        static_cast<int>(std::min<int64_t>(plan.bk, end - n))};
      float magnitudes[256];
      load_rows(other, others);
      kernels.row_magnitudes(others, ld, other.rows, magnitudes);
      top = std::max(top, largest_finite(magnitudes, other.rows));
    }
    scale(here, static_cast<int>(to - from), top);
  }
}

/// Codes and scales of a block of K, and K itself where a matmul out of INT8 takes it.
void Preparation::quantize_k(const Block& b, int64_t hk, int64_t at, float* rows,
                             int8_t* codes) const {
  load_k(b, hk, rows);
  if (data.needs.k_float)
    for (int64_t n = 0; n < tile(); ++n)
      data.k_float[at * tile() + n] = numerics::inf_as_nan(rows[n]);
  if (data.needs.kt_float)
    kernels.transpose_f32(rows, plan.dl, plan.bk, plan.dl, data.kt_float + at * tile(), plan.bk);
  float* scale = data.k_scale + at * plan.bk;
  rotate(rows, b.rows);
  kernels.row_magnitudes(rows, plan.dl, b.rows, scale);
  const auto load_rows = [&](const Block& run, float* to) {
    load_k(run, hk, to);
    rotate(to, run.rows);
  };
  const auto scale_run = [&](float* amax, int count, float top) {
    scale_together(amax, count, top);
    if (plan.writes_codes())
      saved().write_k_scale(b, hk, static_cast<int>(amax - scale), numerics::scale_of(top));
  };
  scale_blocks(b, spec::keys_per_scale(plan.p.recipe, plan.bk), scale, rows + tile(), plan.dl,
               load_rows, scale_run);
  kernels.encode_rows(rows, plan.dl, b.rows, scale, codes, plan.dk);
  if (plan.writes_codes()) saved().write_k(b, hk, codes, scale);
}

void Preparation::finish_k(int64_t at, const int8_t* codes) const {
  const int64_t size = static_cast<int64_t>(plan.bk) * plan.dk;
  int8_t* k8 = data.k8 + at * size;
  std::transform(codes, codes + size, k8,
                 [flip = kernels.flip](int8_t c) { return static_cast<int8_t>(c ^ flip); });
  if (data.needs.k8t)
    kernels.transpose_codes(k8, plan.dk, plan.bk, plan.dl, data.k8t + at * tile(), plan.bk);
}

/// Codes and scales of a block of V. `rows` keeps V with its mean removed.
void Preparation::quantize_v(const Block& b, int64_t hk, int64_t at, float* rows,
                             int8_t* codes) const {
  float* scale = data.v_scale + at * plan.bk;
  load_v(b, hk, rows);
  kernels.row_magnitudes(rows, plan.vl, b.rows, scale);
  const auto load_rows = [&](const Block& run, float* to) { load_v(run, hk, to); };
  if (spec::folds_v(plan.p.recipe))
    scale_blocks(b, kKeysPerScale, scale, rows + value_tile(), plan.vl, load_rows, scale_values);
  else
    scale_blocks(b, plan.bk, scale, rows + value_tile(), plan.vl, load_rows, scale_together);
  kernels.encode_rows(rows, plan.vl, b.rows, scale, codes, plan.vk);
  if (plan.writes_codes()) saved().write_v(b, hk, codes, scale);
}

void Preparation::finish_v(const Block& b, int64_t hk, int64_t at, float* rows,
                           const int8_t* codes) const {
  const bool folds = spec::folds_v(plan.p.recipe);
  float* scale = data.v_scale + at * plan.bk;
  const bool poisoned = std::any_of(scale, scale + b.rows, [](float s) { return std::isnan(s); });
  data.v_poisoned[at] = poisoned;
  for (int j = 0; j < plan.bk; ++j) {
    data.v_log2[at * plan.bk + j] = folds && !poisoned ? std::log2(scale[j]) : 0.0f;
    data.v_inverse[at * plan.bk + j] = folds && !poisoned ? 1.0f / scale[j] : 1.0f;
  }
  if (data.needs.v8t)
    kernels.transpose_codes(codes, plan.vk, plan.bk, plan.vl, data.v8t + at * value_tile(),
                            plan.bk);
  if (!plan.p.lifted(kMatmulO)) kernels.decode_rows(codes, plan.vk, plan.bk, plan.vl, rows);
  if (data.needs.vt_rows)
    kernels.transpose_f32(rows, plan.vl, plan.bk, plan.vl, data.vt_rows + at * value_tile(),
                          plan.bk);
  if (!data.needs.v_rows) return;
  if (!folds) {  // dP takes V as it is
    std::fill(scale, scale + plan.bk, 1.0f);
    kernels.load_rows(a.v.dtype, row_at(a.v, b.seq.batch, hk, b.seq.k_begin + b.first),
                      a.v.stride[2], b.rows, static_cast<int>(plan.p.dv), rows, plan.vl);
    std::fill(rows + static_cast<int64_t>(b.rows) * plan.vl, rows + value_tile(), 0.0f);
  }
  if (plan.dp_bf16)
    kernels.store_rows(Dtype::bf16, data.v_bf16 + at * value_tile(), plan.vl, plan.bk, plan.vl,
                       rows, plan.vl, 1.0f);
  else
    std::copy(rows, rows + value_tile(), data.v_rows + at * value_tile());
}

/// Means of K and V of one key head of one sequence.
void Preparation::means(int64_t slot, int64_t item) const {
  const int64_t sequence = item / plan.p.hk, hk = item % plan.p.hk;
  const spec::Sequence s = plan.p.sequence(sequence);
  float* mu_k = data.mu_k + item * plan.dl;
  float* mu_v = data.mu_v + item * plan.vl;
  std::fill(mu_k, mu_k + plan.dl, 0.0f);
  std::fill(mu_v, mu_v + plan.vl, 0.0f);
  if (plan.reads_codes()) {
    std::copy_n(saved().k_mean(sequence, hk), plan.p.d, mu_k);
    std::copy_n(saved().v_mean(sequence, hk), plan.p.dv, mu_v);
    return;
  }
  if (plan.p.recipe.smooth_k) mean_of(kernels, plan, a.k, s, hk, plan.dl, rows_of(slot), mu_k);
  if (plan.p.recipe.smooth_v && (data.needs.v8t || spec::folds_v(plan.p.recipe)))
    mean_of(kernels, plan, a.v, s, hk, plan.vl, rows_of(slot), mu_v);
  if (!plan.writes_codes()) return;
  std::copy_n(mu_k, plan.p.d, saved().k_mean(sequence, hk));
  std::copy_n(mu_v, plan.p.dv, saved().v_mean(sequence, hk));
}

void Preparation::block(int64_t slot, int64_t at) const {
  const int64_t hk = at / plan.k_blocks;
  const Block b = plan.key_block(at % plan.k_blocks);
  int8_t* codes = data.codes + slot * plan.bk * plan.longest_k();
  float *k_scale = data.k_scale + at * plan.bk, *v_scale = data.v_scale + at * plan.bk;
  std::fill(k_scale, k_scale + plan.bk, 0.0f);
  std::fill(v_scale, v_scale + plan.bk, 1.0f);
  std::memset(codes, 0, static_cast<size_t>(plan.bk) * plan.dk);
  if (plan.reads_codes())
    saved().read_k(b, hk, codes, k_scale);
  else
    quantize_k(b, hk, at, rows_of(slot), codes);
  finish_k(at, codes);
  std::memset(codes, 0, static_cast<size_t>(plan.bk) * plan.vk);
  if (plan.reads_codes())
    saved().read_v(b, hk, codes, v_scale);
  else
    quantize_v(b, hk, at, rows_of(slot), codes);
  finish_v(b, hk, at, rows_of(slot), codes);
}

}  // namespace

void KeyData::place(Arena& arena, const Plan& plan, const KeyNeeds& n) {
  needs = n;
  const int64_t blocks = plan.p.hk * plan.k_blocks;
  const int64_t tile = static_cast<int64_t>(plan.bk) * plan.dl;
  const int64_t value_tile = static_cast<int64_t>(plan.bk) * plan.vl;
  mu_k = arena.take<float>(plan.num_sequences * plan.p.hk * plan.dl);
  mu_v = arena.take<float>(plan.num_sequences * plan.p.hk * plan.vl);
  k8 = arena.take<int8_t>(blocks * plan.bk * plan.dk);
  k_scale = arena.take<float>(blocks * plan.bk);
  if (n.k8t) k8t = arena.take<int8_t>(blocks * tile);
  if (n.v8t) v8t = arena.take<int8_t>(blocks * value_tile);
  for (float** x : {&v_scale, &v_log2, &v_inverse}) *x = arena.take<float>(blocks * plan.bk);
  v_poisoned = arena.take<uint8_t>(blocks);
  if (n.k_float) k_float = arena.take<float>(blocks * tile);
  if (n.kt_float) kt_float = arena.take<float>(blocks * tile);
  if (n.v_rows && plan.dp_bf16) v_bf16 = arena.take<bf16>(blocks * value_tile);
  if (n.v_rows && !plan.dp_bf16) v_rows = arena.take<float>(blocks * value_tile);
  if (n.vt_rows) vt_rows = arena.take<float>(blocks * value_tile);
  rows = arena.take<float>(2 * plan.slots * std::max(tile, value_tile));
  codes = arena.take<int8_t>(static_cast<int64_t>(plan.slots) * plan.bk * plan.longest_k());
}

void prepare_keys(const isa::Kernels& kernels, const Plan& plan, const AttentionArgs& a,
                  const KeyData& data) {
  const Preparation all{kernels, plan, a, data};
  run_items(a.parallel_for, plan, plan.num_sequences * plan.p.hk,
            [&](int64_t slot, int64_t item) { all.means(slot, item); });
  run_items(a.parallel_for, plan, plan.p.hk * plan.k_blocks,
            [&](int64_t slot, int64_t at) { all.block(slot, at); });
}

}  // namespace sagebwd::cpu
