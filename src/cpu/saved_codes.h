// SPDX-License-Identifier: Apache-2.0
// The quantised inputs that a forward hands to a backward (spec/codes.h), as blocks of this
// backend: codes [rows][dk] of Q and K and [rows][vk] of V with zeros behind d and dv, scales
// [rows].
#pragma once

#include "cpu/plan.h"
#include "numerics/octaves.h"
#include "spec/codes.h"

namespace sagebwd::cpu {

class SavedCodes {
 public:
  SavedCodes(const Plan& plan, void* memory) : plan_(plan), view_(plan.p, memory) {}

  /// Blocks of queries.
  void write_queries(const Block& b, int64_t h, const int8_t* codes, const float* scale) const;
  void read_queries(const Block& b, int64_t h, int8_t* codes, float* scale) const;

  /// Blocks of keys.
  void write_k(const Block& b, int64_t hk, const int8_t* codes, const float* scale) const;
  void read_k(const Block& b, int64_t hk, int8_t* codes, float* scale) const;
  void write_v(const Block& b, int64_t hk, const int8_t* codes, const float* scale) const;
  void read_v(const Block& b, int64_t hk, int8_t* codes, float* scale) const;

  /// The centres of K and V in an octave of keys, [d] and [dv], and their scales.
  int8_t* centre8(int64_t sequence, int64_t hk, int octave) const {
    return view_.centre8() + centre_row(sequence, hk, octave) * plan_.p.d;
  }
  float& centre_scale(int64_t sequence, int64_t hk, int octave) const {
    return view_.centre_scale()[centre_row(sequence, hk, octave)];
  }
  int8_t* v_centre8(int64_t sequence, int64_t hk, int octave) const {
    return view_.v_centre8() + centre_row(sequence, hk, octave) * plan_.p.dv;
  }
  float& v_centre_scale(int64_t sequence, int64_t hk, int octave) const {
    return view_.v_centre_scale()[centre_row(sequence, hk, octave)];
  }

 private:
  int64_t query_at(const Block& b, int64_t h) const {
    return (h * plan_.p.b + b.seq.batch) * plan_.p.nq + b.seq.q_begin + b.first;
  }
  int64_t key_at(const Block& b, int64_t hk) const {
    return (hk * plan_.p.b + b.seq.batch) * plan_.p.nk + b.seq.k_begin + b.first;
  }
  int64_t centre_row(int64_t sequence, int64_t hk, int octave) const {
    return hk * view_.layout.key_blocks + plan_.scale_block_start(sequence) +
           numerics::first_block_of(octave);
  }

  const Plan& plan_;
  spec::CodesView view_;
};

}  // namespace sagebwd::cpu
