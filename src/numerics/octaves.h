// SPDX-License-Identifier: Apache-2.0
// Centres of K and V in recipe `vectorwise`. Blocks of 128 keys of a document lie in octaves: block
// 0, block 1, blocks 2 and 3, 4 to 7, and so on. The keys of an octave are centred by the mean of a
// sample of the octave before it; so a centre depends on earlier keys alone. In block 0 K is
// centred by key 0, because keys often share a large offset. V there has no centre: the first value
// is often unlike all others, and would make their codes coarse. Nor has it one in an octave where
// the mean of the sample is hardly more than chance: it would only make codes of small values
// coarse, such as those of sinks.
//
// The mean is summed in FP64 over the sample's tokens as given, in order, leaving out those that
// hold NaN or Inf; rounded to FP32, rotated if it is of K, and then quantised with one scale: what
// is subtracted is scale·code. So the logits of a centre of K are an integer product of codes. The
// centre of V comes back as the row sum of P over the octave times the centre.
#pragma once

#include <cstdint>

#include "base/inline.h"

namespace sagebwd::numerics {

inline constexpr int kMostSampled = 128;  // keys of a sample

/// The octave of a block of 128 keys, counted from the first of the document: the bits of its
/// number. Not std::bit_width, of which CUDA 13.0 makes 0 in device code, without a word.
SAGE_INLINE int octave_of_block(int64_t block) {
  return block == 0 ? 0 : 32 - __builtin_clz(static_cast<uint32_t>(block));
}

/// The first block of an octave.
SAGE_INLINE int64_t first_block_of(int octave) {
  return octave == 0 ? 0 : int64_t{1} << (octave - 1);
}

/// Octaves of a document of `keys` keys.
SAGE_INLINE int octaves_of(int64_t keys) {
  return keys == 0 ? 0 : octave_of_block((keys - 1) / 128) + 1;
}

/// One key of each `step` neighbours from `first` on, `count` of them. Their distances vary, so
/// that no pattern of tokens (a delimiter every hundred keys, rows of an image) is met by all or by
/// none.
struct Sample {
  int64_t first, step, end;  // end: keys that there are
  int count;

  SAGE_INLINE int64_t key(int n) const {
    const uint32_t spread = (static_cast<uint32_t>(n) * 2654435761u) >> 8;
    const int64_t at = first + n * step + spread % static_cast<uint32_t>(step);
    return at < end ? at : end - 1;
  }
};

/// The first octave whose values have a centre.
inline constexpr int kFirstValueCentre = 1;
/// The energy, a sum of squares over all channels, that a mean of values has at least if it becomes
/// a centre, beside that of the values in their mean. Of values around zero it is the 128th part.
inline constexpr double kLeastCentreShare = 0.02;

/// The keys whose mean centres an octave. They do not depend on the length of the document.
SAGE_INLINE Sample centre_sample(int octave) {
  if (octave == 0) return {0, 1, 1, 1};
  if (octave == 1) return {0, 1, 128, kMostSampled};
  const int64_t start = first_block_of(octave);
  return {64 * start, start / 2, 128 * start, kMostSampled};
}

/// The keys whose mean is taken out of the operand of dQ, which need not be causal.
SAGE_INLINE Sample spread_sample(int64_t keys) {
  const int64_t step = (keys + kMostSampled - 1) / kMostSampled;
  return {0, step, keys, step == 0 ? 0 : static_cast<int>((keys + step - 1) / step)};
}

}  // namespace sagebwd::numerics
