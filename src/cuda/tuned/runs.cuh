// SPDX-License-Identifier: Apache-2.0
// Means of K per sequence and key head, in `paper`.
//
//   blocks of the workspace   │0 1 2 3│4 5 6 7│8 …    kMeanBlocks blocks are a span
//   packed sequences          │A A B B│B B B C│C …    what a span holds of a sequence is a run
//
// Where nothing is packed, every sequence starts a span.
//
// A thread block takes a span and adds up each of its runs, in FP64 at the end. The thread block
// that finishes the last run of a sequence adds the sequence's runs in order. So the result does
// not depend on scheduling.
//
// The mean's memory also says whether the mean is there: it holds +0 until then, and a mean of zero
// is stored as -0. Readers poll until no +0 is left. This ends: the pieces of work that make the
// mean were handed out earlier (items.cuh).
#pragma once

#include "cuda/tile/layout.h"
#include "cuda/tile/sequence.cuh"

namespace sagebwd::cuda::tuned {

inline constexpr int kMeanBlocks = 4;

/// The runs of a sequence.
struct Runs {
  int first_block;  // of the sequence
  int first_span;   // the first block of the span that holds it
  int count;
  __device__ Runs(const tile::Sequence& s, bool packed)
      : first_block(static_cast<int>(s.k_pad / kBlock)),
        first_span(packed ? first_block / kMeanBlocks * kMeanBlocks : first_block),
        count((first_block - first_span + (s.nk + kBlock - 1) / kBlock + kMeanBlocks - 1) /
              kMeanBlocks) {}
  /// The first block of a run; its part is stored under that number.
  __device__ int block(int run) const { return max(first_block, first_span + run * kMeanBlocks); }
};

}  // namespace sagebwd::cuda::tuned
