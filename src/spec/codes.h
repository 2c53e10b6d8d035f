// SPDX-License-Identifier: Apache-2.0
// The quantised inputs of a forward in one piece of memory, which a backward can take instead of q,
// k and v. The layout belongs to no implementation: one may write it and another read it.
//
// Tokens of all sequences lie behind one another, heads outside: [head][token][channel]. Blocks of
// keys are counted through all sequences, each of which starts a new one. Every part starts at a
// multiple of 16 bytes.
#pragma once

#include <cstdint>
#include <string>

#include "base/math.h"
#include "spec/problem.h"

namespace sagebwd::spec {

/// A code that no value has. It stands in the first channel of a key that holds NaN or Inf, because
/// the scale of a block cannot say so.
inline constexpr int8_t kPoisonedCode = -128;

/// Why a recipe has no codes that stand for q, k and v; empty when it has.
inline std::string codes_refusal(const Recipe& r) {
  constexpr uint32_t kFromInputs =
      kMatmulS | kMatmulO | kMatmulSRecompute | kMatmulDQ | kMatmulDK;
  if (r.scheme != Scheme::vectorwise) return "recipe paper makes dP from V itself";
  if ((r.high_precision & kFromInputs) != 0)
    return "matmuls out of INT8 take q, k and v themselves";
  if (r.smooth_q) return "Q-smoothing needs the mean queries as well";
  return "";
}

/// The number of the first key block of sequence t, where the host knows the documents.
inline int64_t first_key_block(const Problem& p, int64_t t) {
  if (!p.packed()) return t * ceil_div(p.nk, kKeysPerScale);
  int64_t blocks = 0;
  for (int64_t s = 0; s < t; ++s) blocks += ceil_div(p.sequence(s).nk, kKeysPerScale);
  return blocks;
}

/// Where each part starts, in bytes from the start of the memory.
struct CodesLayout {
  explicit CodesLayout(const Problem& p) {
    const int64_t queries = p.h * p.b * p.nq, keys = p.hk * p.b * p.nk;
    // With documents on the device nobody here knows their lengths; each has at most one block that
    // is not full.
    key_blocks = p.packed() ? p.nk / kKeysPerScale + p.documents.count
                            : p.b * ceil_div(p.nk, kKeysPerScale);
    q8 = take(queries * p.d), k8 = take(keys * p.d), v8 = take(keys * p.d);
    q_scale = take_floats(queries), mean_logit = take_floats(queries);
    v_scale = take_floats(keys);
    k_scale = take_floats(p.recipe.k_per_token ? keys : p.hk * key_blocks);
    k_mean = take_floats(p.num_sequences() * p.hk * p.d);
    v_mean = take_floats(p.num_sequences() * p.hk * p.d);
  }
  int64_t key_blocks;
  int64_t bytes = 0;
  int64_t q8, k8, v8;           // [h][tokens][d], [hk][tokens][d]
  int64_t q_scale, mean_logit;  // [h][tokens]; mean_logit: c·q·mean(K), which K-smoothing took away
  int64_t v_scale;              // [hk][tokens]
  int64_t k_scale;              // [hk][tokens], or [hk][key_blocks]
  int64_t k_mean, v_mean;       // [sequences][hk][d]

 private:
  int64_t take(int64_t size) {
    const int64_t at = bytes;
    bytes += round_up(size, 16);
    return at;
  }
  int64_t take_floats(int64_t count) { return take(count * static_cast<int64_t>(sizeof(float))); }
};

/// The parts as pointers.
struct CodesView {
  CodesView(const Problem& p, void* data) : layout(p), base(static_cast<char*>(data)) {}

  int8_t* q8() const { return reinterpret_cast<int8_t*>(base + layout.q8); }
  int8_t* k8() const { return reinterpret_cast<int8_t*>(base + layout.k8); }
  int8_t* v8() const { return reinterpret_cast<int8_t*>(base + layout.v8); }
  float* q_scale() const { return floats(layout.q_scale); }
  float* mean_logit() const { return floats(layout.mean_logit); }
  float* v_scale() const { return floats(layout.v_scale); }
  float* k_scale() const { return floats(layout.k_scale); }
  float* k_mean() const { return floats(layout.k_mean); }
  float* v_mean() const { return floats(layout.v_mean); }

  CodesLayout layout;
  char* base;

 private:
  float* floats(int64_t at) const { return reinterpret_cast<float*>(base + at); }
};

}  // namespace sagebwd::spec
