// SPDX-License-Identifier: Apache-2.0
// The quantised inputs of a forward in one piece of memory (AttentionArgs::codes), which a backward
// takes instead of q, k and v. The layout belongs to no implementation: one may write it and
// another read it.
//
// Tokens of all sequences lie behind one another, heads outside: [head][token][channel]. Blocks of
// 128 keys are counted through all sequences, each of which starts a new one. Every part starts at
// a multiple of 16 bytes.
#pragma once

#include <cstdint>

#include "sagebwd/recipe.h"

namespace sagebwd {

/// The version of the layout below. 4: V has centres, too.
inline constexpr int kCodesVersion = 4;

struct CodesShape {
  int64_t h, hk;
  int64_t d, dv = 0;      // head dim of q and k; of v, 0: the same
  int64_t queries, keys;  // tokens of all sequences
  int64_t sequences;      // batch entries, or documents of a packed batch
  bool packed;

  /// Blocks of keys; an upper bound for packed batches, whose lengths only the device may know.
  int64_t key_blocks() const {
    if (packed) return keys / kKeysPerScale + sequences;
    const int64_t each = sequences == 0 ? 0 : keys / sequences;
    return sequences * ((each + kKeysPerScale - 1) / kKeysPerScale);
  }
};

/// Where each part starts, in bytes from the start of the memory.
struct CodesLayout {
  explicit CodesLayout(const CodesShape& s) : key_blocks(s.key_blocks()) {
    const int64_t queries = s.h * s.queries, keys = s.hk * s.keys, dv = s.dv == 0 ? s.d : s.dv;
    q8 = take(queries * s.d), k8 = take(keys * s.d), v8 = take(keys * dv);
    q_scale = take(queries * 4), v_scale = take(keys * 4), k_scale = take(keys * 4);
    centre8 = take(s.hk * key_blocks * s.d), centre_scale = take(s.hk * key_blocks * 4);
    v_centre8 = take(s.hk * key_blocks * dv), v_centre_scale = take(s.hk * key_blocks * 4);
  }
  int64_t key_blocks;
  int64_t bytes = 0;
  int64_t q8, k8, v8;        // INT8: [h][queries][d], [hk][keys][d], [hk][keys][dv]
  int64_t q_scale;           // FP32: [h][queries]
  int64_t v_scale, k_scale;  // FP32: [hk][keys]; NaN for a token that holds NaN or Inf
  // What is subtracted from K and V of an octave (numerics/octaves.h), in the row of the octave's
  // first block; the other rows are not written. INT8: [hk][key_blocks][d] and
  // [hk][key_blocks][dv], and their scales, FP32: [hk][key_blocks].
  int64_t centre8, centre_scale, v_centre8, v_centre_scale;

 private:
  int64_t take(int64_t size) {
    const int64_t at = bytes;
    bytes += (size + 15) / 16 * 16;
    return at;
  }
};

}  // namespace sagebwd
