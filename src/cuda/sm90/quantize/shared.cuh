// SPDX-License-Identifier: Apache-2.0
// The shared memory of the kernel of codes, its barriers, and how a block of tokens is shared.
#pragma once

#include "cuda/arch/mbarrier.cuh"
#include "cuda/arch/shared_memory.cuh"
#include "cuda/arch/target.cuh"
#include "cuda/sm90/pipeline.cuh"
#include "cuda/sm90/quantize/matrices.cuh"
#include "cuda/tile/layout.h"
#include "cuda/tuned/items.cuh"

namespace sagebwd::cuda::sm90::codes {

using tuned::Item, tuned::Kind;

/// A block of tokens belongs to one or two warpgroups, the consumers. A product has 64 rows, which
/// are a tile. Whatever the head dim, a thread has 64 numbers.
template <int D>
struct Shape {
  static_assert(D == 64 || D == 128);
  static constexpr int kPanels = D / 64;  // of 64 channels
  static constexpr int kWarpgroups = D / 64;
  static constexpr int kConsumers = 128 * kWarpgroups, kWarps = kConsumers / 32;
  static constexpr int kThreads = kConsumers + 32;          // with the producer
  static constexpr int kTiles = kBlock / 64 / kWarpgroups;  // of a warpgroup
  static constexpr int kRows = 2 * kTiles;                  // of a thread
  static constexpr int kResident = D == 128 ? 2 : 4;        // thread blocks on a multiprocessor
};

/// Tokens as they arrive: rows of 64 channels have 128 bytes and are swizzled. Further channels are
/// a panel of their own.
inline constexpr int kRowBytes = 128, kPanelBytes = kBlock * kRowBytes, kTileBytes = 64 * kRowBytes;

inline constexpr int kStages = 2;  // blocks of tokens that are here or on their way
/// Descriptions of pieces live longer than the tokens: a consumer may still read one while the next
/// two are in the stages.
inline constexpr int kSlots = kStages + 2;

/// What consumers do next: codes of a block of tokens.
struct Piece {
  Kind kind;  // none: there is no more work
  int head;
  tile::Sequence s;
  int first, left;  // the block's first token, and the tokens from there to the sequence's end
  // The first token in the workspace and in the caller's codes, heads included.
  int64_t row, saved_row;
};

template <typename T, int D>
struct SharedPlan {
  using S = Shape<D>;
  struct Stage {
    alignas(1024) uint8_t panel[S::kPanels][kPanelBytes];
  };
  Stage stage[kStages];
  Matrices<T, D> matrices;
  alignas(16) float centre[kSlots][D];  // of the keys or values of a piece
  Piece piece[kSlots];
  // Bits of largest magnitudes, of each warp, in two rounds. A piece has its own, because a
  // warpgroup may be done with it while the other one still reads them.
  alignas(16) uint32_t top[kSlots][2][8];

  // Full: a piece is described, and its tokens have arrived. Empty: the tokens have been read.
  alignas(8) uint64_t full[kStages], empty[kStages];
  uint64_t centre_full[kSlots];
};

template <typename Plan>
__device__ void init_barriers(Plan& shared) {
  for (int i = 0; i < kStages; ++i) {
    arch::barrier_init(arch::shared_address(&shared.full[i]), 1);
    arch::barrier_init(arch::shared_address(&shared.empty[i]), Plan::S::kWarps);
  }
  for (int i = 0; i < kSlots; ++i)
    arch::barrier_init(arch::shared_address(&shared.centre_full[i]), 1);
  arch::barrier_init_done();
}

/// All consumers meet here. The barrier of all threads has the number 0.
template <int D>
__device__ __forceinline__ void meet() {
  arch::barrier_of(1, Shape<D>::kConsumers);
}

}  // namespace sagebwd::cuda::sm90::codes
