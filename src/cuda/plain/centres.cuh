// SPDX-License-Identifier: Apache-2.0
// Where the centre of a key or a value lies.
#pragma once

#include "cuda/plain/sequence.cuh"
#include "numerics/octaves.h"

namespace sagebwd::cuda::plain {

/// The octave of a key of a sequence.
__device__ inline int octave_of_key(int key) {
  return numerics::octave_of_block(key / kKeysPerScale);
}

/// The row of an octave's centre.
__device__ inline int64_t centre_row(const Centres& x, const tile::Sequence& s, int head,
                                     int octave) {
  const tile::Sequence in_blocks = tile::sequence_at<kKeysPerScale>(x.blocks, s.index);
  return head * x.key_blocks + in_blocks.k_pad / kKeysPerScale + numerics::first_block_of(octave);
}

/// What is subtracted from a channel of the keys, or of their values.
__device__ inline float centre_value(const Centres& x, int d, int64_t row, int channel) {
  return x.scale[row] * static_cast<float>(x.codes[row * d + channel]);
}

}  // namespace sagebwd::cuda::plain
