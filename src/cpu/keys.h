// SPDX-License-Identifier: Apache-2.0
// The key side of a call: means, codes and operand layouts of K and V, made once and read by every
// query block.
#pragma once

#include <algorithm>

#include "cpu/plan.h"
#include "numerics/octaves.h"

namespace sagebwd::cpu {

/// What a call needs from the key side. Blocks are [hk][k_blocks].
struct KeyNeeds {
  bool k8t, v8t, k_float, kt_float;
  bool v_rows;   // V as dP multiplies it with dO
  bool vt_rows;  // Vᵀ in FP32, for P·V where P is not quantised
};

/// The centres of K of a key head of a sequence (`vectorwise`).
struct Centres {
  int8_t* codes;  // [centre rows][dk], left operand
  float* scale;   // [centre rows]
  float* values;  // [centre rows][dl], scale times code
};

struct KeyData {
  KeyNeeds needs;
  // [num_sequences][hk][dl]: the mean key, which K lacks in `paper`, and the operand of dQ in both.
  float* mu_k = nullptr;
  int8_t* k8 = nullptr;      // [bk][dk] a block, left operand
  float* k_scale = nullptr;  // [bk] a block
  int8_t* k8t = nullptr;     // [dl][bk] a block, left operand: K for dQ
  float* k_fold = nullptr;   // [bk] a block: the scales of k8t; in `paper` k_scale
  int8_t* v8t = nullptr;     // [vl][bk] a block, left operand
  float* v_scale = nullptr;  // [bk] a block; NaN for a token that is not finite
  // [bk] a block: what P is multiplied with, as a logarithm, and its inverse. Zeros and ones where
  // V's scale is not folded into P.
  float *v_log2 = nullptr, *v_inverse = nullptr;
  uint8_t* v_poisoned = nullptr;  // one a block: it holds NaN or Inf
  float* k_float = nullptr;       // [bk][dl] a block: K, in `paper` without its mean
  float* kt_float = nullptr;      // [dl][bk] a block: the same
  float* v_rows = nullptr;        // [bk][vl] a block: codes of V, or V as given
  bf16* v_bf16 = nullptr;         // the same where plan.dp_bf16
  float* vt_rows = nullptr;       // [vl][bk] a block: codes of V, or V as given
  // Scratch, long enough for a block of K or V, and for the sample of a centre.
  float* rows = nullptr;    // [slots][scratch_rows][longest_l]
  int8_t* codes = nullptr;  // [slots][bk][longest_k]

  Centres all_centres = {};    // [num_sequences][hk] of them
  float* v_centres = nullptr;  // [num_sequences][hk][octaves][vl], where plan.centres_v()

  void place(Arena& arena, const Plan& plan, const KeyNeeds& n);
  Centres centres(const Plan& plan, int64_t sequence, int64_t hk) const {
    const int64_t row = (sequence * plan.p.hk + hk) * plan.centre_rows();
    return {all_centres.codes + row * plan.dk, all_centres.scale + row,
            all_centres.values + row * plan.dl};
  }
  /// What is subtracted from V in an octave of keys, [vl]; null: nothing.
  float* v_centre(const Plan& plan, int64_t sequence, int64_t hk, int octave) const {
    if (v_centres == nullptr || octave < numerics::kFirstValueCentre) return nullptr;
    return v_centres + ((sequence * plan.p.hk + hk) * plan.octaves + octave) * plan.vl;
  }
  const float* mean_k(const Plan& plan, int64_t sequence, int64_t hk) const {
    return mu_k + (sequence * plan.p.hk + hk) * plan.dl;
  }
  static int64_t scratch_rows(const Plan& plan) {
    return std::max(plan.bk, numerics::kMostSampled);
  }
};

void prepare_keys(const isa::Kernels& kernels, const Plan& plan, const AttentionArgs& a,
                  const KeyData& data);

}  // namespace sagebwd::cpu
