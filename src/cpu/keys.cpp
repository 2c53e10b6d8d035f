// SPDX-License-Identifier: Apache-2.0
#include "cpu/keys.h"

#include <algorithm>
#include <cmath>
#include <cstring>

#include "cpu/saved_codes.h"
#include "cpu/scales.h"

namespace sagebwd::cpu {
namespace {

/// Codes as a left operand has them, and back (Kernels::flip).
void flip_codes(const int8_t* from, int64_t n, uint8_t flip, int8_t* to) {
  std::transform(from, from + n, to, [flip](int8_t c) { return static_cast<int8_t>(c ^ flip); });
}

/// The key side of one call, block by block.
struct Preparation {
  const isa::Kernels& kernels;
  const Plan& plan;
  const AttentionArgs& a;
  const KeyData& data;

  void means(int64_t slot, int64_t item) const;
  void block(int64_t slot, int64_t at) const;
  // `vectorwise`: what the operand of dQ lacks, and that operand.
  void dq_mean(int64_t item) const;
  void dq_block(int64_t slot, int64_t at) const;

 private:
  float* rows_of(int64_t slot) const {
    return data.rows + slot * data.scratch_rows(plan) * plan.longest_l();
  }
  int64_t tile() const { return static_cast<int64_t>(plan.bk) * plan.dl; }
  int64_t value_tile() const { return static_cast<int64_t>(plan.bk) * plan.vl; }
  void load(const TensorView& x, const Block& b, int64_t hk, int ld, float* rows) const;
  void rotate(float* rows, int count) const;
  SavedCodes saved() const { return {plan, a.codes}; }
  static int octave_of(const Block& b) {
    return numerics::octave_of_block(b.first / kKeysPerScale);
  }
  const float* centre_of(const Block& b, int64_t hk) const {
    return data.centres(plan, b.sequence, hk).values + static_cast<int64_t>(plan.dl) * octave_of(b);
  }
  void mean_key(int64_t sequence, int64_t hk, float* rows, float* mean) const;
  void make_centre(const TensorView& x, const spec::Sequence& s, int64_t hk, int octave, int ld,
                   float* rows, float* mean) const;
  void centres(int64_t slot, int64_t sequence, int64_t hk) const;
  bool stands_out(const float* mean, const float* values, int count) const;
  void v_centres(int64_t slot, int64_t sequence, int64_t hk) const;
  void quantize_k(const Block& b, int64_t hk, int64_t at, float* rows, int8_t* codes) const;
  void quantize_v(const Block& b, int64_t hk, int64_t at, float* rows, int8_t* codes) const;
  void finish_k(int64_t at, const int8_t* codes) const;
  void finish_v(const Block& b, int64_t hk, int64_t at, float* rows, const int8_t* codes) const;
};

/// Loads a block into scratch, padding tokens zero.
void Preparation::load(const TensorView& x, const Block& b, int64_t hk, int ld, float* rows) const {
  kernels.load_rows(x.dtype, row_at(x, b.seq.batch, hk, b.seq.k_begin + b.first), x.stride[2],
                    b.rows, static_cast<int>(x.shape[3]), rows, ld);
  std::fill(rows + static_cast<int64_t>(b.rows) * ld, rows + static_cast<int64_t>(plan.bk) * ld,
            0.0f);
}

void Preparation::rotate(float* rows, int count) const {
  if (plan.p.recipe.rotate) kernels.rotate_rows(rows, plan.dl, count, static_cast<int>(plan.p.d));
}

/// Codes and scales of a block of K, and K itself where a matmul out of INT8 takes it.
void Preparation::quantize_k(const Block& b, int64_t hk, int64_t at, float* rows,
                             int8_t* codes) const {
  load(a.k, b, hk, plan.dl, rows);
  if (plan.paper()) kernels.subtract_row(rows, plan.dl, b.rows, data.mean_k(plan, b.sequence, hk));
  if (data.needs.k_float)
    for (int64_t n = 0; n < tile(); ++n)
      data.k_float[at * tile() + n] = numerics::inf_as_nan(rows[n]);
  if (data.needs.kt_float)
    kernels.transpose_f32(rows, plan.dl, plan.bk, plan.dl, data.kt_float + at * tile(), plan.bk);
  float* scale = data.k_scale + at * plan.bk;
  rotate(rows, b.rows);
  if (!plan.paper()) kernels.subtract_row(rows, plan.dl, b.rows, centre_of(b, hk));
  kernels.row_magnitudes(rows, plan.dl, b.rows, scale);
  if (plan.paper())
    scale_together(scale, b.rows);
  else
    scale_lone_keys(scale, b.rows);
  kernels.encode_rows(rows, plan.dl, b.rows, scale, codes, plan.dk);
  if (plan.writes_codes()) saved().write_k(b, hk, codes, scale);
}

void Preparation::finish_k(int64_t at, const int8_t* codes) const {
  const int64_t size = static_cast<int64_t>(plan.bk) * plan.dk;
  int8_t* k8 = data.k8 + at * size;
  flip_codes(codes, size, kernels.flip, k8);
  if (data.needs.k8t && plan.paper())
    kernels.transpose_codes(k8, plan.dk, plan.bk, plan.dl, data.k8t + at * tile(), plan.bk);
}

/// The mean of the keys that are finite throughout, summed in FP64 (`paper`).
void Preparation::mean_key(int64_t sequence, int64_t hk, float* rows, float* mean) const {
  const spec::Sequence s = plan.p.sequence(sequence);
  const int d = static_cast<int>(plan.p.d);
  double sum[256] = {};
  int64_t count = 0;
  for (int64_t n = 0; n < s.nk; n += plan.bk) {
    const int many = static_cast<int>(std::min<int64_t>(plan.bk, s.nk - n));
    kernels.load_rows(a.k.dtype, row_at(a.k, s.batch, hk, s.k_begin + n), a.k.stride[2], many, d,
                      rows, plan.dl);
    count += kernels.sum_rows(rows, plan.dl, many, d, sum);
  }
  for (int c = 0; c < d && count > 0; ++c)
    mean[c] = static_cast<float>(sum[c] / static_cast<double>(count));
}

/// The mean of an octave's sample of K or V; `rows` [ld] has room for the sample.
void Preparation::make_centre(const TensorView& x, const spec::Sequence& s, int64_t hk, int octave,
                              int ld, float* rows, float* mean) const {
  const int d = static_cast<int>(x.shape[3]);
  const numerics::Sample sample = numerics::centre_sample(octave);
  for (int n = 0; n < sample.count; ++n)
    kernels.load_rows(x.dtype, row_at(x, s.batch, hk, s.k_begin + sample.key(n)), 0, 1, d,
                      rows + static_cast<int64_t>(n) * ld, ld);
  double sum[256] = {};
  const int finite = kernels.sum_rows(rows, ld, sample.count, d, sum);
  for (int c = 0; c < d && finite > 0; ++c) mean[c] = static_cast<float>(sum[c] / finite);
}

/// The centres of K of one key head of one sequence.
void Preparation::centres(int64_t slot, int64_t sequence, int64_t hk) const {
  const spec::Sequence s = plan.p.sequence(sequence);
  const Centres out = data.centres(plan, sequence, hk);
  std::memset(out.codes, 0, static_cast<size_t>(plan.centre_rows()) * plan.dk);
  std::fill_n(out.scale, plan.centre_rows(), 0.0f);
  for (int octave = 0; octave < numerics::octaves_of(s.nk); ++octave) {
    int8_t* codes = out.codes + static_cast<int64_t>(octave) * plan.dk;
    if (plan.reads_codes()) {
      std::copy_n(saved().centre8(sequence, hk, octave), plan.p.d, codes);
      out.scale[octave] = saved().centre_scale(sequence, hk, octave);
    } else {
      alignas(64) float mean[256] = {};
      if (plan.p.recipe.smooth_k) make_centre(a.k, s, hk, octave, plan.dl, rows_of(slot), mean);
      rotate(mean, 1);
      kernels.row_magnitudes(mean, plan.dl, 1, &out.scale[octave]);
      scale_tokens(&out.scale[octave], 1);
      kernels.encode_rows(mean, plan.dl, 1, &out.scale[octave], codes, plan.dk);
    }
    if (plan.writes_codes()) {
      std::copy_n(codes, plan.p.d, saved().centre8(sequence, hk, octave));
      saved().centre_scale(sequence, hk, octave) = out.scale[octave];
    }
  }
  kernels.decode_rows(out.codes, plan.dk, plan.centre_rows(), plan.dl, out.values);
  for (int octave = 0; octave < plan.centre_rows(); ++octave)
    for (int c = 0; c < plan.dl; ++c)
      out.values[static_cast<int64_t>(octave) * plan.dl + c] *= out.scale[octave];
  flip_codes(out.codes, static_cast<int64_t>(plan.centre_rows()) * plan.dk, kernels.flip,
             out.codes);
}

/// Whether a mean of values becomes a centre. Those that hold NaN or Inf do not count.
bool Preparation::stands_out(const float* mean, const float* values, int count) const {
  double of_mean = 0, of_values = 0;
  int counted = 0;
  for (int c = 0; c < plan.vl; ++c) of_mean += static_cast<double>(mean[c]) * mean[c];
  for (int n = 0; n < count; ++n) {
    const float* row = values + static_cast<int64_t>(n) * plan.vl;
    if (!std::all_of(row, row + plan.p.dv, numerics::is_finite)) continue;
    ++counted;
    for (int c = 0; c < plan.p.dv; ++c) of_values += static_cast<double>(row[c]) * row[c];
  }
  return counted * of_mean >= numerics::kLeastCentreShare * of_values;
}

/// The same of V.
void Preparation::v_centres(int64_t slot, int64_t sequence, int64_t hk) const {
  const spec::Sequence s = plan.p.sequence(sequence);
  for (int octave = 0; octave < numerics::octaves_of(s.nk); ++octave) {
    float* values = data.v_centre(plan, sequence, hk, octave);
    int8_t codes[256] = {};
    float scale = 0.0f;
    if (plan.reads_codes()) {
      std::copy_n(saved().v_centre8(sequence, hk, octave), plan.p.dv, codes);
      scale = saved().v_centre_scale(sequence, hk, octave);
    } else if (values != nullptr) {
      alignas(64) float mean[256] = {};
      make_centre(a.v, s, hk, octave, plan.vl, rows_of(slot), mean);
      if (!stands_out(mean, rows_of(slot), numerics::centre_sample(octave).count))
        std::fill_n(mean, plan.vl, 0.0f);
      kernels.row_magnitudes(mean, plan.vl, 1, &scale);
      scale_tokens(&scale, 1);
      kernels.encode_rows(mean, plan.vl, 1, &scale, codes, plan.vk);
    }
    if (plan.writes_codes()) {
      std::copy_n(codes, plan.p.dv, saved().v_centre8(sequence, hk, octave));
      saved().v_centre_scale(sequence, hk, octave) = scale;
    }
    for (int c = 0; c < plan.vl && values != nullptr; ++c)
      values[c] = scale * static_cast<float>(codes[c]);
  }
}

/// The mean key of a sample, from codes: rotated.
void Preparation::dq_mean(int64_t item) const {
  const int64_t sequence = item / plan.p.hk, hk = item % plan.p.hk;
  const spec::Sequence s = plan.p.sequence(sequence);
  const Centres centres = data.centres(plan, sequence, hk);
  const numerics::Sample sample = numerics::spread_sample(s.nk);
  double sum[256] = {};
  int count = 0;
  for (int n = 0; n < sample.count; ++n) {
    const int64_t j = sample.key(n);
    const int64_t row =
        (hk * plan.k_blocks + plan.k_start[sequence] + j / plan.bk) * plan.bk + j % plan.bk;
    const float scale = data.k_scale[row];
    if (std::isnan(scale)) continue;
    ++count;
    const float* centre = centres.values + static_cast<int64_t>(plan.dl) *
                                               numerics::octave_of_block(j / kKeysPerScale);
    for (int c = 0; c < plan.p.d; ++c) {
      const auto code = static_cast<int8_t>(data.k8[row * plan.dk + c] ^ kernels.flip);
      sum[c] += static_cast<double>(scale * static_cast<float>(code) + centre[c]);
    }
  }
  float* mean = data.mu_k + item * plan.dl;
  std::fill_n(mean, plan.dl, 0.0f);
  for (int c = 0; c < plan.p.d && count > 0; ++c) mean[c] = static_cast<float>(sum[c] / count);
}

/// K of a block for dQ: made again from its codes, without that mean, and with one scale.
void Preparation::dq_block(int64_t slot, int64_t at) const {
  const int64_t hk = at / plan.k_blocks;
  const Block b = plan.key_block(at % plan.k_blocks);
  const float *mean = data.mean_k(plan, b.sequence, hk), *centre = centre_of(b, hk);
  float* rows = rows_of(slot);
  int8_t* codes = data.codes + slot * plan.bk * plan.longest_k();
  const int64_t size = static_cast<int64_t>(plan.bk) * plan.dk;
  flip_codes(data.k8 + at * size, size, kernels.flip, codes);
  kernels.decode_rows(codes, plan.dk, plan.bk, plan.dl, rows);
  const float* scale = data.k_scale + at * plan.bk;
  float shift[256];
  for (int c = 0; c < plan.dl; ++c) shift[c] = centre[c] - mean[c];
  for (int j = 0; j < plan.bk; ++j) {
    float* row = rows + static_cast<int64_t>(j) * plan.dl;
    if (j < b.rows && !std::isnan(scale[j]))
      std::transform(row, row + plan.dl, shift, row,
                     [s = scale[j]](float code, float add) { return code * s + add; });
    else
      std::fill_n(row, plan.dl, 0.0f);
  }
  float* fold = data.k_fold + at * plan.bk;
  kernels.row_magnitudes(rows, plan.dl, plan.bk, fold);
  scale_together(fold, plan.bk);
  std::memset(codes, 0, static_cast<size_t>(size));
  kernels.encode_rows(rows, plan.dl, plan.bk, fold, codes, plan.dk);
  flip_codes(codes, size, kernels.flip, codes);
  kernels.transpose_codes(codes, plan.dk, plan.bk, plan.dl, data.k8t + at * tile(), plan.bk);
}

/// Codes and scales of a block of V. Without centres `rows` keeps V.
void Preparation::quantize_v(const Block& b, int64_t hk, int64_t at, float* rows,
                             int8_t* codes) const {
  float* scale = data.v_scale + at * plan.bk;
  load(a.v, b, hk, plan.vl, rows);
  const float* centre = data.v_centre(plan, b.sequence, hk, octave_of(b));
  if (centre != nullptr) kernels.subtract_row(rows, plan.vl, b.rows, centre);
  kernels.row_magnitudes(rows, plan.vl, b.rows, scale);
  if (plan.paper())
    scale_together(scale, b.rows);
  else
    scale_lone_values(scale, b.rows);
  kernels.encode_rows(rows, plan.vl, b.rows, scale, codes, plan.vk);
  if (plan.writes_codes()) saved().write_v(b, hk, codes, scale);
}

void Preparation::finish_v(const Block& b, int64_t hk, int64_t at, float* rows,
                           const int8_t* codes) const {
  const bool folds = spec::folds_v(plan.p.recipe);
  float* scale = data.v_scale + at * plan.bk;
  data.v_poisoned[at] = std::any_of(scale, scale + b.rows, [](float s) { return std::isnan(s); });
  for (int j = 0; j < plan.bk; ++j) {
    const bool has_scale = folds && !std::isnan(scale[j]);
    data.v_log2[at * plan.bk + j] = has_scale ? std::log2(scale[j]) : 0.0f;
    data.v_inverse[at * plan.bk + j] = has_scale ? 1.0f / scale[j] : 1.0f;
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

/// What is subtracted from K and V of one head of one sequence.
void Preparation::means(int64_t slot, int64_t item) const {
  const int64_t sequence = item / plan.p.hk, hk = item % plan.p.hk;
  if (!plan.paper()) {
    centres(slot, sequence, hk);
    v_centres(slot, sequence, hk);
    return;
  }
  float* mean = data.mu_k + item * plan.dl;
  std::fill_n(mean, plan.dl, 0.0f);
  if (plan.p.recipe.smooth_k) mean_key(sequence, hk, rows_of(slot), mean);
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
  k8 = arena.take<int8_t>(blocks * plan.bk * plan.dk);
  k_scale = arena.take<float>(blocks * plan.bk);
  if (n.k8t) k8t = arena.take<int8_t>(blocks * tile);
  k_fold = k_scale;
  if (!plan.paper()) {
    if (n.k8t) k_fold = arena.take<float>(blocks * plan.bk);
    const int64_t rows_of_centres = plan.num_sequences * plan.p.hk * plan.centre_rows();
    all_centres.codes = arena.take<int8_t>(rows_of_centres * plan.dk);
    all_centres.scale = arena.take<float>(rows_of_centres);
    all_centres.values = arena.take<float>(rows_of_centres * plan.dl);
  }
  if (plan.centres_v())
    v_centres = arena.take<float>(plan.num_sequences * plan.p.hk * plan.octaves * plan.vl);
  if (n.v8t) v8t = arena.take<int8_t>(blocks * value_tile);
  for (float** x : {&v_scale, &v_log2, &v_inverse}) *x = arena.take<float>(blocks * plan.bk);
  v_poisoned = arena.take<uint8_t>(blocks);
  if (n.k_float) k_float = arena.take<float>(blocks * tile);
  if (n.kt_float) kt_float = arena.take<float>(blocks * tile);
  if (n.v_rows && plan.dp_bf16) v_bf16 = arena.take<bf16>(blocks * value_tile);
  if (n.v_rows && !plan.dp_bf16) v_rows = arena.take<float>(blocks * value_tile);
  if (n.vt_rows) vt_rows = arena.take<float>(blocks * value_tile);
  rows = arena.take<float>(plan.slots * scratch_rows(plan) * plan.longest_l());
  codes = arena.take<int8_t>(static_cast<int64_t>(plan.slots) * plan.bk * plan.longest_k());
}

void prepare_keys(const isa::Kernels& kernels, const Plan& plan, const AttentionArgs& a,
                  const KeyData& data) {
  const Preparation all{kernels, plan, a, data};
  run_items(a.parallel_for, plan, plan.num_sequences * plan.p.hk,
            [&](int64_t slot, int64_t item) { all.means(slot, item); });
  run_items(a.parallel_for, plan, plan.p.hk * plan.k_blocks,
            [&](int64_t slot, int64_t at) { all.block(slot, at); });
  if (plan.paper() || !data.needs.k8t) return;
  run_items(a.parallel_for, plan, plan.num_sequences * plan.p.hk,
            [&](int64_t, int64_t item) { all.dq_mean(item); });
  run_items(a.parallel_for, plan, plan.p.hk * plan.k_blocks,
            [&](int64_t slot, int64_t at) { all.dq_block(slot, at); });
  if (!plan.p.recipe.rotate) return;
  for (int64_t item = 0; item < plan.num_sequences * plan.p.hk; ++item)
    kernels.rotate_rows_back(data.mu_k + item * plan.dl, plan.dl, 1, static_cast<int>(plan.p.d));
}

}  // namespace sagebwd::cpu
