// SPDX-License-Identifier: Apache-2.0
// Sizes of the fused backward's tiles, and its shared memory.
#pragma once

#include <cstdint>
#include <type_traits>

#include "cuda/sm80/params.h"
#include "cuda/tile/sequence.cuh"

namespace sagebwd::cuda::sm80 {

/// How a thread block cuts a tile up: a warp has 32 keys and 32 queries, and kShare warps have the
/// same keys. kPaper: one scale per tile, as the recipe wants it. kFronts and kBacks: query tiles
/// in shared memory, as S and dP, and as dV and dK, read them. kHolds: a warp holds its rows of K
/// and V in registers. kResident: thread blocks on a multiprocessor.
template <int D_, bool kPaper_, int kWarps_, int kShare_, int kFronts_, int kBacks_, bool kHolds_,
          int kResident_>
struct FusedShape {
  static constexpr int D = D_, kWarps = kWarps_, kResident = kResident_;
  static constexpr bool kPaper = kPaper_, kHolds = kHolds_;
  static constexpr int kFronts = kFronts_, kBacks = kBacks_;
  static constexpr int kThreads = 32 * kWarps;
  static constexpr int kM = 2;  // blocks of 16 keys of a warp
  static constexpr int kMyQueries = 32, kQueryBlocks = kMyQueries / 8;
  static constexpr int kShare = kShare_, kGroups = kWarps / kShare;
  static constexpr int kTileK = 16 * kM * kGroups, kTileQ = kMyQueries * kShare;
  static constexpr int kChannels = D / kShare, kChannelBlocks = kChannels / 8;
  // dQ: each warp has two blocks of 16 queries and kDqBlocks of 8 channels.
  static constexpr int kDqPairs = kTileQ / 32, kDqGroups = kWarps / kDqPairs;
  static constexpr int kDqBlocks = D / 8 / kDqGroups;
  static_assert(kBlock % kTileK == 0 && kBlock % kTileQ == 0);
  static_assert(kFronts == kBacks || (kFronts == 1 && kBacks == 2));
  static_assert(!kHolds || kFronts == 1);
};

/// What a thread block works on. It lies in shared memory too: what few instructions of the loop
/// need would be in the way of all in registers.
struct FusedWork {
  int first, end;      // queries of a head that see a key of the block, whole tiles
  uint32_t next_head;  // rows from there to the first of the next head
  int steps;           // tiles of all heads
  int whole_begin;  // first query that sees every key, and how far from it on tiles may start that
  uint32_t whole;   // need no mask
  int key0;         // first key of the block, inside the sequence
  int kv_head;
  uint32_t zero;  // which the compiler does not know
  tile::Band band;
  tile::Sequence s;
};

/// What the warps of a thread block share.
template <class Shape>
struct FusedShared {
  static constexpr int D = Shape::D, kTileQ = Shape::kTileQ, kTileK = Shape::kTileK;
  struct Front {  // what S and dP read
    alignas(128) uint8_t q8[kTileQ * D];
    alignas(128) uint8_t do16[kTileQ * D * 2];
    alignas(16) QueryExponent exponent[kTileQ];
    alignas(16) QueryGradient gradient[kTileQ];
  };
  struct Back {  // what dV and dK read
    alignas(128) uint8_t q8t[kTileQ * D];
    alignas(128) uint8_t do8t[kTileQ * D];
  };
  // Numbers of keys and queries lie in the order of FusedLane::row_at.
  struct Maxima {  // bits of FP32 scales: the order of positive floats is that of their bits
    uint32_t p[kTileK], ds[kTileK], query[kTileQ];
  };
  struct Keys {
    alignas(128) uint8_t k8[kTileK * D];
    alignas(128) uint8_t v16[kTileK * D * 2];
  };
  // A operands: [m][warp][lane], and of the queries [block of 16][warp][lane]
  static constexpr int kOperands = Shape::kGroups * (kTileQ / 32) * Shape::kM;
  struct Codes {
    uint4 p[kOperands][32], ds[kOperands][32], query[kOperands][32];
  };
  struct KeysAndCodes {
    Keys keys;
    Codes codes;
  };
  union KeysOrCodes {  // where warps hold the keys, codes come to lie in their place
    Keys keys;
    Codes codes;
  };
  std::conditional_t<Shape::kHolds, KeysOrCodes, KeysAndCodes> both;
  alignas(128) uint8_t k8t[kTileK * D];
  Front front[Shape::kFronts];
  Back back[Shape::kBacks];
  alignas(16) float k_scale[kTileK];
  alignas(16) Maxima maxima[2];
  // What has to come off dV and dK again (tile/codes.cuh): of kTilesWithStart tiles, and of those
  // before them.
  alignas(16) float starts[2][2 * kTileK];
  alignas(16) FusedWork work;
  // `paper`: the tile's scales of P and dS, four times each, as a lane reads them.
  alignas(16) uint32_t tile_scales[2][8];
};

}  // namespace sagebwd::cuda::sm80
