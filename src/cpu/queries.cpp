// SPDX-License-Identifier: Apache-2.0
#include "cpu/queries.h"

#include <algorithm>
#include <cstring>

#include "cpu/saved_codes.h"
#include "cpu/scales.h"
#include "numerics/quantize.h"

namespace sagebwd::cpu {

namespace {

/// Shifts of a block of queries.
int shifts(const Plan& plan) { return !plan.paper() ? plan.octaves : plan.p.capped() ? 1 : 0; }

}  // namespace

void QueryBlock::place(Arena& arena, const Plan& plan, int64_t blocks, bool lifted) {
  q8 = arena.take<int8_t>(blocks * plan.bq * plan.dk);
  scale = arena.take<float>(blocks * plan.bq);
  logit_factor = arena.take<float>(blocks * plan.bq);
  start = arena.take<int32_t>(blocks * plan.bq);
  if (plan.p.recipe.smooth_q) {
    mean = arena.take<float>(blocks * plan.dl);
    turned_mean = arena.take<float>(blocks * plan.dl);
  }
  if (shifts(plan) > 0) shift = arena.take<float>(blocks * shifts(plan) * plan.bq);
  if (lifted) qt_float = arena.take<float>(blocks * plan.bq * plan.dl);
}

QueryBlock QueryBlock::at(const Plan& plan, int64_t block) const {
  QueryBlock b = *this;
  b.q8 += block * plan.bq * plan.dk;
  b.scale += block * plan.bq;
  b.logit_factor += block * plan.bq;
  b.start += block * plan.bq;
  if (mean != nullptr) b.mean += block * plan.dl, b.turned_mean += block * plan.dl;
  if (shift != nullptr) b.shift += block * shifts(plan) * plan.bq;
  if (qt_float != nullptr) b.qt_float += block * plan.bq * plan.dl;
  return b;
}

void QueryScratch::place(Arena& arena, const Plan& plan) {
  rows = arena.take<float>(static_cast<int64_t>(plan.slots) * plan.bq * plan.longest_l());
  smooth = arena.take<float>(static_cast<int64_t>(plan.slots) * plan.bq * plan.longest_l());
  codes = arena.take<int8_t>(static_cast<int64_t>(plan.slots) * plan.bq * plan.longest_k());
  shift = arena.take<double>(static_cast<int64_t>(plan.slots) * plan.bq);
  if (!plan.paper())
    dots = arena.take<int32_t>(static_cast<int64_t>(plan.slots) * plan.centre_rows() * plan.bq);
}

QueryScratch QueryScratch::at(const Plan& plan, int64_t slot) const {
  const int64_t tile = static_cast<int64_t>(plan.bq) * plan.longest_l();
  return {rows + slot * tile, smooth + slot * tile, codes + slot * plan.bq * plan.longest_k(),
          shift + slot * plan.bq,
          dots == nullptr ? nullptr : dots + slot * plan.centre_rows() * plan.bq};
}

void load_query_rows(const isa::Kernels& kernels, const Plan& plan, const TensorView& x,
                     const Block& b, int64_t h, float* rows, int ld) {
  kernels.load_rows(x.dtype, row_at(x, b.seq.batch, h, b.seq.q_begin + b.first), x.stride[2],
                    b.rows, static_cast<int>(x.shape[3]), rows, ld);
  std::fill(rows + static_cast<int64_t>(b.rows) * ld, rows + static_cast<int64_t>(plan.bq) * ld,
            0.0f);
}

void encode_queries(const isa::Kernels& kernels, const Plan& plan, const float* rows, int ld,
                    int count, float* scale, int8_t* codes, int ldc) {
  std::memset(codes, 0, static_cast<size_t>(plan.bq) * ldc);
  std::fill(scale, scale + plan.bq, 0.0f);
  kernels.row_magnitudes(rows, ld, count, scale);
  if (plan.paper())
    scale_together(scale, count);
  else
    scale_tokens(scale, count);
  kernels.encode_rows(rows, ld, count, scale, codes, ldc);
}

namespace {

/// Codes, scales and shifts of a block from the queries themselves.
void quantize_queries(const isa::Kernels& kernels, const Plan& plan, const AttentionArgs& a,
                      const Block& b, int64_t h, const float* mu_k, const QueryBlock& out,
                      const QueryScratch& scratch) {
  const int d = static_cast<int>(plan.p.d);
  const Recipe& recipe = plan.p.recipe;
  load_query_rows(kernels, plan, a.q, b, h, scratch.rows, plan.dl);
  if (plan.paper()) {
    kernels.row_dots(scratch.rows, plan.dl, b.rows, mu_k, 0, scratch.shift);
    for (int i = 0; i < b.rows; ++i)
      scratch.shift[i] = static_cast<float>(static_cast<double>(plan.p.scale) * scratch.shift[i]);
  }
  std::copy(scratch.rows, scratch.rows + static_cast<int64_t>(plan.bq) * plan.dl, scratch.smooth);
  if (recipe.smooth_q) {
    double sum[256] = {};
    const int count = kernels.sum_rows(scratch.rows, plan.dl, b.rows, d, sum);
    std::fill_n(out.mean, plan.dl, 0.0f);
    for (int c = 0; c < d && count > 0; ++c) out.mean[c] = static_cast<float>(sum[c] / count);
    kernels.subtract_row(scratch.smooth, plan.dl, b.rows, out.mean);
    std::copy(out.mean, out.mean + plan.dl, out.turned_mean);
    if (recipe.rotate) kernels.rotate_rows(out.turned_mean, plan.dl, 1, d);
  }
  if (recipe.rotate) kernels.rotate_rows(scratch.smooth, plan.dl, b.rows, d);
  encode_queries(kernels, plan, scratch.smooth, plan.dl, b.rows, out.scale, scratch.codes, plan.dk);
}

/// The logits of the octaves' centres, from codes. None where S is lifted: K is whole there.
void centre_logits(const isa::Kernels& kernels, const Plan& plan, const KeyData& keys,
                   const Block& b, int64_t hk, const QueryBlock& out, const QueryScratch& scratch) {
  const Centres centres = keys.centres(plan, b.sequence, hk);
  kernels.store_ss({plan.centre_rows(), plan.bq, plan.dk, centres.codes, plan.dk, out.q8,
                    kernels.flip != 0 ? out.start : nullptr},
                   scratch.dots, plan.bq);
  for (int octave = 0; octave < plan.octaves; ++octave)
    for (int i = 0; i < plan.bq; ++i) {
      const int at = octave * plan.bq + i;
      out.shift[at] = out.qt_float != nullptr ? 0.0f
                                              : static_cast<float>(scratch.dots[at]) *
                                                    centres.scale[octave] * out.logit_factor[i];
    }
}

}  // namespace

void prepare_queries(const isa::Kernels& kernels, const Plan& plan, const AttentionArgs& a,
                     const KeyData& keys, const Block& b, int64_t h, const QueryBlock& out,
                     const QueryScratch& scratch) {
  const int64_t hk = h / plan.p.group();
  const float* mu_k = keys.mean_k(plan, b.sequence, hk);
  std::fill(scratch.shift, scratch.shift + plan.bq, 0.0);
  if (plan.reads_codes()) {
    std::memset(scratch.codes, 0, static_cast<size_t>(plan.bq) * plan.dk);
    std::fill(out.scale, out.scale + plan.bq, 0.0f);
    SavedCodes(plan, a.codes).read_queries(b, h, scratch.codes, out.scale);
  } else {
    quantize_queries(kernels, plan, a, b, h, mu_k, out, scratch);
    if (plan.writes_codes())
      SavedCodes(plan, a.codes).write_queries(b, h, scratch.codes, out.scale);
  }
  const float unit = plan.p.scale * numerics::kLog2e;
  if (out.qt_float != nullptr) {  // S is lifted: no codes, so no smoothing either
    kernels.transpose_f32(scratch.rows, plan.dl, plan.bq, plan.dl, out.qt_float, plan.bq);
    for (int i = 0; i < plan.bq; ++i)  // NaN for a query that holds Inf
      out.logit_factor[i] = std::isnan(out.scale[i]) ? out.scale[i] : unit;
  }
  for (int i = 0; i < plan.bq && out.shift != nullptr && plan.paper(); ++i)
    out.shift[i] = i < b.rows ? static_cast<float>(scratch.shift[i] / numerics::kLn2) : 0.0f;
  kernels.pack_along_rows(scratch.codes, plan.dk, plan.bq, plan.dk, out.q8);
  kernels.sum_row_codes(scratch.codes, plan.dk, plan.bq, plan.dl, out.start);
  for (int i = 0; i < plan.bq; ++i) {
    out.start[i] *= -kernels.flip;
    if (out.qt_float == nullptr) out.logit_factor[i] = out.scale[i] * unit;
  }
  if (!plan.paper()) centre_logits(kernels, plan, keys, b, hk, out, scratch);
}

void mean_query_logits(const Plan& plan, const float* mean, const float* k_rows, float* bias) {
  const double unit = static_cast<double>(plan.p.scale * numerics::kLog2e);
  for (int j = 0; j < plan.bk; ++j) {
    double dot = 0.0;
    for (int c = 0; c < plan.dl; ++c)
      dot += static_cast<double>(mean[c]) *
             static_cast<double>(k_rows[static_cast<int64_t>(j) * plan.dl + c]);
    bias[j] = static_cast<float>(unit * dot);
  }
}

}  // namespace sagebwd::cpu
