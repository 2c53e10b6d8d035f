// SPDX-License-Identifier: Apache-2.0
// Every instance of the forward kernel, and everything that sets it apart: one table.
#pragma once

#include "cuda/lists/lists.h"
#include "cuda/tile/layout.h"

namespace sagebwd::cuda::sm80::fwd {

// A warp has 16 queries. They are the rows of its accumulators.
inline constexpr int kWarpQueries = 16;

/// One instance of the kernel.
struct Config {
  int d;       // channels, padded
  int tile_k;  // keys of a tile
  int warps;
  int resident;         // thread blocks on a multiprocessor, if its shared memory has room for them
  bool paper = false;   // recipe `paper`: no centres of K, no scale per token of V
  bool lists = false;   // walks the tiles of block lists (cuda/lists)
  bool capped = false;  // logits are capped (tile/softcap.cuh)

  /// Whether V's token scale is folded into P.
  constexpr bool folds_v() const { return !paper; }
  /// Whether keys lack the centre of their octave.
  constexpr bool has_centres() const { return !paper; }
  constexpr int threads() const { return 32 * warps; }
  constexpr int queries() const { return kWarpQueries * warps; }
  // Accumulators come in blocks of 8 columns: keys in the scores, channels in O.
  constexpr int key_blocks() const { return tile_k / 8; }
  constexpr int channel_blocks() const { return d / 8; }
  /// INT8 products contract 32 keys at a time.
  constexpr int key_steps() const { return tile_k / 32; }
  constexpr bool valid() const {
    return kBlock % queries() == 0 && kBlock % tile_k == 0 &&
           (!lists || queries() == kListedQueries) && !(paper && (lists || capped));
  }
};

// The table. Thread blocks are small and several share a multiprocessor: while one waits at its
// barrier, or for its products, the others have work of another kind. A tile lies in one octave.

inline constexpr Config kNarrow{.d = 64, .tile_k = 128, .warps = 4, .resident = 3};
inline constexpr Config kWide{.d = 128, .tile_k = 128, .warps = 4, .resident = 2};
// The tiles of `paper` are part of the recipe. They have 64 keys.
inline constexpr Config kPaperNarrow{
    .d = 64, .tile_k = 64, .warps = 4, .resident = 3, .paper = true};
inline constexpr Config kPaperWide{
    .d = 128, .tile_k = 64, .warps = 4, .resident = 2, .paper = true};
// Soft capping.
constexpr Config with_cap(Config config) {
  config.capped = true;
  return config;
}
// Block lists. Tiles lie within a block, so they have 64 keys where blocks have no multiple of 128.
constexpr Config listed(Config config, int tile_k) {
  config.lists = true, config.tile_k = tile_k;
  return config;
}

/// The names by which the host knows the instances: nvcc cannot launch a kernel whose template
/// parameter is a structure.
enum class Instance {
  narrow,
  wide,
  paper_narrow,
  paper_wide,
  capped_narrow,
  capped_wide,
  listed_narrow,
  listed_narrow_64,
  listed_wide,
  listed_wide_64
};
constexpr Config config_of(Instance instance) {
  switch (instance) {
    case Instance::narrow:
      return kNarrow;
    case Instance::wide:
      return kWide;
    case Instance::paper_narrow:
      return kPaperNarrow;
    case Instance::paper_wide:
      return kPaperWide;
    case Instance::capped_narrow:
      return with_cap(kNarrow);
    case Instance::capped_wide:
      return with_cap(kWide);
    case Instance::listed_narrow:
      return listed(kNarrow, 128);
    case Instance::listed_narrow_64:
      return listed(kNarrow, 64);
    case Instance::listed_wide:
      return listed(kWide, 128);
    default:
      return listed(kWide, 64);
  }
}

}  // namespace sagebwd::cuda::sm80::fwd
