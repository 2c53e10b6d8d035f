// SPDX-License-Identifier: Apache-2.0
#include "cpu/saved_codes.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>

namespace sagebwd::cpu {

void SavedCodes::write_rows(int8_t* to, const int8_t* codes, int rows) const {
  for (int r = 0; r < rows; ++r)
    std::copy_n(codes + static_cast<int64_t>(r) * plan_.dk, plan_.p.d, to + r * plan_.p.d);
}

void SavedCodes::read_rows(const int8_t* from, int8_t* codes, int rows) const {
  for (int r = 0; r < rows; ++r)
    std::copy_n(from + r * plan_.p.d, plan_.p.d, codes + static_cast<int64_t>(r) * plan_.dk);
}

float& SavedCodes::k_scale(const Block& b, int64_t hk, int row) const {
  if (plan_.p.recipe.k_per_token) return view_.k_scale()[key_at(b, hk) + row];
  const int64_t block = plan_.scale_block_start(b.sequence) + (b.first + row) / kKeysPerScale;
  return view_.k_scale()[hk * view_.layout.key_blocks + block];
}

void SavedCodes::write_queries(const Block& b, int64_t h, const int8_t* codes, const float* scale,
                               const double* mean_logit) const {
  const int64_t at = query_at(b, h);
  write_rows(view_.q8() + at * plan_.p.d, codes, b.rows);
  std::copy_n(scale, b.rows, view_.q_scale() + at);
  for (int i = 0; i < b.rows; ++i) view_.mean_logit()[at + i] = static_cast<float>(mean_logit[i]);
}

void SavedCodes::read_queries(const Block& b, int64_t h, int8_t* codes, float* scale,
                              double* mean_logit) const {
  const int64_t at = query_at(b, h);
  read_rows(view_.q8() + at * plan_.p.d, codes, b.rows);
  std::copy_n(view_.q_scale() + at, b.rows, scale);
  for (int i = 0; i < b.rows; ++i) mean_logit[i] = static_cast<double>(view_.mean_logit()[at + i]);
}

void SavedCodes::write_k(const Block& b, int64_t hk, const int8_t* codes,
                         const float* scale) const {
  int8_t* to = view_.k8() + key_at(b, hk) * plan_.p.d;
  write_rows(to, codes, b.rows);
  for (int r = 0; r < b.rows; ++r) {
    if (std::isnan(scale[r])) to[r * plan_.p.d] = kPoisonedCode;
    if (plan_.p.recipe.k_per_token) k_scale(b, hk, r) = scale[r];
  }
}

void SavedCodes::write_k_scale(const Block& b, int64_t hk, int row, float scale) const {
  const bool first_of_block = (b.first + row) % kKeysPerScale == 0;
  if (first_of_block && !plan_.p.recipe.k_per_token) k_scale(b, hk, row) = scale;
}

void SavedCodes::read_k(const Block& b, int64_t hk, int8_t* codes, float* scale) const {
  read_rows(view_.k8() + key_at(b, hk) * plan_.p.d, codes, b.rows);
  for (int r = 0; r < b.rows; ++r) {
    int8_t& first = codes[static_cast<int64_t>(r) * plan_.dk];
    const bool poisoned = first == kPoisonedCode;
    if (poisoned) first = 0;
    scale[r] = poisoned ? std::numeric_limits<float>::quiet_NaN() : k_scale(b, hk, r);
  }
}

void SavedCodes::write_v(const Block& b, int64_t hk, const int8_t* codes,
                         const float* scale) const {
  write_rows(view_.v8() + key_at(b, hk) * plan_.p.d, codes, b.rows);
  std::copy_n(scale, b.rows, view_.v_scale() + key_at(b, hk));
}

void SavedCodes::read_v(const Block& b, int64_t hk, int8_t* codes, float* scale) const {
  read_rows(view_.v8() + key_at(b, hk) * plan_.p.d, codes, b.rows);
  std::copy_n(view_.v_scale() + key_at(b, hk), b.rows, scale);
}

}  // namespace sagebwd::cpu
