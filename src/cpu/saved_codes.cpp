// SPDX-License-Identifier: Apache-2.0
#include "cpu/saved_codes.h"

#include <algorithm>

namespace sagebwd::cpu {

namespace {

/// Copies d codes of each row from rows [ld_from] to rows [ld_to].
void copy_rows(const int8_t* from, int64_t ld_from, int8_t* to, int64_t ld_to, int rows,
               int64_t d) {
  for (int r = 0; r < rows; ++r) std::copy_n(from + r * ld_from, d, to + r * ld_to);
}

}  // namespace

void SavedCodes::write_queries(const Block& b, int64_t h, const int8_t* codes,
                               const float* scale) const {
  const int64_t at = query_at(b, h);
  const int64_t d = plan_.p.d;
  copy_rows(codes, plan_.dk, view_.q8() + at * d, d, b.rows, d);
  std::copy_n(scale, b.rows, view_.q_scale() + at);
}

void SavedCodes::read_queries(const Block& b, int64_t h, int8_t* codes, float* scale) const {
  const int64_t at = query_at(b, h);
  const int64_t d = plan_.p.d;
  copy_rows(view_.q8() + at * d, d, codes, plan_.dk, b.rows, d);
  std::copy_n(view_.q_scale() + at, b.rows, scale);
}

void SavedCodes::write_k(const Block& b, int64_t hk, const int8_t* codes,
                         const float* scale) const {
  const int64_t d = plan_.p.d;
  copy_rows(codes, plan_.dk, view_.k8() + key_at(b, hk) * d, d, b.rows, d);
  std::copy_n(scale, b.rows, view_.k_scale() + key_at(b, hk));
}

void SavedCodes::read_k(const Block& b, int64_t hk, int8_t* codes, float* scale) const {
  const int64_t d = plan_.p.d;
  copy_rows(view_.k8() + key_at(b, hk) * d, d, codes, plan_.dk, b.rows, d);
  std::copy_n(view_.k_scale() + key_at(b, hk), b.rows, scale);
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
