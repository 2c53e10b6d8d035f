// SPDX-License-Identifier: Apache-2.0
// The centres of K and V, in every recipe but `paper`.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "cuda/host/launch.h"
#include "cuda/tile/sequences.h"
#include "cuda/tile/views.h"
#include "sagebwd/types.h"

namespace sagebwd::cuda::tuned {

/// What is subtracted from K or V of each octave (numerics/octaves.h), as in the caller's memory
/// (sagebwd/codes.h): in the row of the octave's first block.
struct Centres {
  int8_t* codes = nullptr;  // [hk, blocks, d]
  float* scale = nullptr;   // [hk, blocks]
  int64_t blocks = 0;

  /// The row of an octave that starts `first` blocks behind block `block` of all sequences.
  constexpr int64_t row(int head, int64_t block, int64_t first) const {
    return head * blocks + block + first;
  }
};

/// The same once more, where one copy takes those of a sequence and key head: a row for each octave
/// that there may be. Those of octaves that do not exist hold anything.
inline constexpr int kCentreRows = 32;
struct CentreRows {
  int8_t* codes = nullptr;  // [sequences, hk, kCentreRows, D]; null: nobody needs them
  float* scale = nullptr;   // [sequences, hk, kCentreRows]
};
/// Those of V once more, as an operand whose contraction index is the octave. Zeros where there is
/// none.
struct CentreColumns {
  uint16_t* codes = nullptr;  // bf16: [sequences, hk, D, kCentreRows]; null: nobody needs them
  float* scale = nullptr;     // [sequences, hk, kCentreRows]
};

struct CentreJob {
  Sequences seq;
  int d, hk;
  int octaves;   // of the longest sequence
  int rotation;  // channels that the rotation of K mixes; 0: none
  bool zero;     // the recipe has no centres: all are zero
  Strided k, v;
  Centres of_k, of_v;
  CentreRows rows = {};
  CentreColumns columns = {};
};

/// Makes them from keys and values as the caller has them. Start::early: the kernel before this one
/// has waited for all others, and has nothing that this one reads.
void launch_centres(const CentreJob& job, Dtype dtype, int padded_d, cudaStream_t stream,
                    Start start = Start::behind);

}  // namespace sagebwd::cuda::tuned
