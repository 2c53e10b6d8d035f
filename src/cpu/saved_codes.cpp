// SPDX-License-Identifier: Apache-2.0
#include "cpu/saved_codes.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>

namespace sagebwd::cpu {

namespace {

/// Copies d codes of each row from rows [ld_from] to rows [ld_to].
void copy_rows(const int8_t* from, int64_t ld_from, int8_t* to, int64_t ld_to, int rows,
               int64_t d) {
  for (int r = 0; r < rows; ++r) std::copy_n(from + r * ld_from, d, to + r * ld_to);
}

}  // namespace

float& SavedCodes::k_scale(const Block& b, int64_t hk, int row) const {
  if (plan_.tokenwise()) return view_.k_scale()[key_at(b, hk) + row];
  const int64_t block = plan_.scale_block_start(b.sequence) + (b.first + row) / kKeysPerScale;
  return view_.k_scale()[hk * view_.layout.key_blocks + block];
}

void SavedCodes::write_queries(const Block& b, int64_t h, const int8_t* codes, const float* scale,
                               const double* mean_logit) const {
  const int64_t at = query_at(b, h);
  const int64_t d = plan_.p.d;
  copy_rows(codes, plan_.dk, view_.q8() + at * d, d, b.rows, d);
  std::copy_n(scale, b.rows, view_.q_scale() + at);
  for (int i = 0; i < b.rows && !plan_.tokenwise(); ++i)
    view_.mean_logit()[at + i] = static_cast<float>(mean_logit[i]);
}

void SavedCodes::read_queries(const Block& b, int64_t h, int8_t* codes, float* scale,
                              double* mean_logit) const {
  const int64_t at = query_at(b, h);
  const int64_t d = plan_.p.d;
  copy_rows(view_.q8() + at * d, d, codes, plan_.dk, b.rows, d);
  std::copy_n(view_.q_scale() + at, b.rows, scale);
  for (int i = 0; i < b.rows; ++i)
    mean_logit[i] = plan_.tokenwise() ? 0.0 : static_cast<double>(view_.mean_logit()[at + i]);
}

void SavedCodes::write_k(const Block& b, int64_t hk, const int8_t* codes,
                         const float* scale) const {
  const int64_t d = plan_.p.d;
  int8_t* to = view_.k8() + key_at(b, hk) * d;
  copy_rows(codes, plan_.dk, to, d, b.rows, d);
  if (plan_.tokenwise()) {
    std::copy_n(scale, b.rows, &k_scale(b, hk, 0));
    return;
  }
  for (int r = 0; r < b.rows; ++r)
    if (std::isnan(scale[r])) to[r * d] = kPoisonedCode;
}

void SavedCodes::write_k_scale(const Block& b, int64_t hk, int row, float scale) const {
  const bool first_of_block = (b.first + row) % kKeysPerScale == 0;
  if (first_of_block && !plan_.tokenwise()) k_scale(b, hk, row) = scale;
}

void SavedCodes::read_k(const Block& b, int64_t hk, int8_t* codes, float* scale) const {
  const int64_t d = plan_.p.d;
  copy_rows(view_.k8() + key_at(b, hk) * d, d, codes, plan_.dk, b.rows, d);
  if (plan_.tokenwise()) {
    std::copy_n(&k_scale(b, hk, 0), b.rows, scale);
    return;
  }
  for (int r = 0; r < b.rows; ++r) {
    int8_t& first = codes[static_cast<int64_t>(r) * plan_.dk];
    const bool poisoned = first == kPoisonedCode;
    if (poisoned) first = 0;
    scale[r] = poisoned ? std::numeric_limits<float>::quiet_NaN() : k_scale(b, hk, r);
  }
}

void SavedCodes::write_v(const Block& b, int64_t hk, const int8_t* codes,
                         const float* scale) const {
  const int64_t dv = plan_.p.dv;
  copy_rows(codes, plan_.vk, view_.v8() + key_at(b, hk) * dv, dv, b.rows, dv);
  std::copy_n(scale, b.rows, view_.v_scale() + key_at(b, hk));
}

void SavedCodes::read_v(const Block& b, int64_t hk, int8_t* codes, float* scale) const {
  const int64_t dv = plan_.p.dv;
  copy_rows(view_.v8() + key_at(b, hk) * dv, dv, codes, plan_.vk, b.rows, dv);
  std::copy_n(view_.v_scale() + key_at(b, hk), b.rows, scale);
}

}  // namespace sagebwd::cpu
