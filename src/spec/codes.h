// SPDX-License-Identifier: Apache-2.0
// The codes that a forward saves (sagebwd/codes.h), as the implementations see them.
#pragma once

#include <cstdint>
#include <string>

#include "base/math.h"
#include "sagebwd/codes.h"
#include "spec/problem.h"

namespace sagebwd::spec {

/// Why a recipe has no codes that stand for q, k and v; empty when it has.
inline std::string codes_refusal(const Recipe& r) {
  constexpr uint32_t kFromInputs = kMatmulS | kMatmulO | kMatmulSRecompute | kMatmulDQ | kMatmulDK;
  if (r.scheme == Scheme::paper) return "recipe paper makes dP from V itself";
  if ((r.high_precision & kFromInputs) != 0)
    return "matmuls out of INT8 take q, k and v themselves";
  return "";
}

/// The number of the first key block of sequence t, where the host knows the documents.
inline int64_t first_key_block(const Problem& p, int64_t t) {
  if (!p.packed()) return t * ceil_div(p.nk, kKeysPerScale);
  int64_t blocks = 0;
  for (int64_t s = 0; s < t; ++s) blocks += ceil_div(p.sequence(s).nk, kKeysPerScale);
  return blocks;
}

inline CodesLayout codes_layout(const Problem& p) {
  return CodesLayout({.h = p.h,
                      .hk = p.hk,
                      .d = p.d,
                      .dv = p.dv,
                      .queries = p.b * p.nq,
                      .keys = p.b * p.nk,
                      .sequences = p.num_sequences(),
                      .packed = p.packed()});
}

/// The parts as pointers.
struct CodesView {
  CodesView(const Problem& p, void* data)
      : layout(codes_layout(p)), base(static_cast<char*>(data)) {}

  int8_t* q8() const { return reinterpret_cast<int8_t*>(base + layout.q8); }
  int8_t* k8() const { return reinterpret_cast<int8_t*>(base + layout.k8); }
  int8_t* v8() const { return reinterpret_cast<int8_t*>(base + layout.v8); }
  float* q_scale() const { return floats(layout.q_scale); }
  float* v_scale() const { return floats(layout.v_scale); }
  float* k_scale() const { return floats(layout.k_scale); }
  int8_t* centre8() const { return reinterpret_cast<int8_t*>(base + layout.centre8); }
  float* centre_scale() const { return floats(layout.centre_scale); }
  int8_t* v_centre8() const { return reinterpret_cast<int8_t*>(base + layout.v_centre8); }
  float* v_centre_scale() const { return floats(layout.v_centre_scale); }

  CodesLayout layout;
  char* base;

 private:
  float* floats(int64_t at) const { return reinterpret_cast<float*>(base + at); }
};

}  // namespace sagebwd::spec
