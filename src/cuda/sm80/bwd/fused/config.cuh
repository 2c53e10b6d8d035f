// SPDX-License-Identifier: Apache-2.0
// Every instance of the fused backward, and everything that sets it apart: one table.
#pragma once

#include "cuda/arch/target.cuh"
#include "cuda/lists/lists.h"
#include "cuda/sm80/bwd/fused/code_generation.cuh"
#include "cuda/tile/layout.h"

namespace sagebwd::cuda::sm80::fused_backward {

// A warp computes 32 keys x 32 queries of a tile's scores. Keys are the rows of its accumulators.
inline constexpr int kWarpKeys = 32, kKeyBlocks = kWarpKeys / 16;
inline constexpr int kWarpQueries = 32, kQueryBlocks = kWarpQueries / 8;

/// One instance of the kernel.
struct Config {
  Instance instance = Instance::narrow;
  int d = 64;  // channels, padded
  // A tile is key_strips x query_strips warps: the warps of a key strip have the same 32 keys, the
  // warps of a query strip the same 32 queries.
  int key_strips = 2, query_strips = 2;
  // Query tiles in shared memory: of what S and dP read (front), and of what dV and dK read (back).
  int fronts = 1, backs = 2;
  int resident = 1;          // thread blocks on a multiprocessor
  bool holds_keys = false;   // a warp holds its rows of K and V in registers
  bool one_place = false;    // codes and back of a query tile lie where its front was
  bool keeps_codes = false;  // a warp reads only the codes of other warps from shared memory
  // The start of integer sums is added to dV and dK and comes off later (tile/codes.cuh).
  bool starts_stay_on = false;
  unsigned wants = 0;

  constexpr bool general() const { return (wants & kGeneral) != 0; }
  constexpr bool dithers_dq() const { return (wants & kDitherDq) != 0; }
  constexpr bool lists() const { return (wants & kLists) != 0; }
  constexpr bool capped() const { return (wants & kCapped) != 0; }
  constexpr bool paper() const { return (wants & kPaper) != 0; }
  /// Whether V is given as codes with a scale per key.
  constexpr bool has_v_codes() const { return !paper(); }
  /// Whether dQ is made from codes of K of its own, whose scale the keys of a thread block share.
  /// Else K's scale is folded into dS, key by key.
  constexpr bool has_dq_keys() const { return !paper(); }
  constexpr int warps() const { return key_strips * query_strips; }
  constexpr int threads() const { return 32 * warps(); }
  constexpr int tile_k() const { return kWarpKeys * key_strips; }
  constexpr int tile_q() const { return kWarpQueries * query_strips; }
  /// Channels of dK and dV that a warp owns: those of its key strip share them out.
  constexpr int channels() const { return d / query_strips; }
  constexpr int channel_blocks() const { return channels() / 8; }
  /// Blocks of 8 channels of dQ that a warp owns: those of its query strip share them out.
  constexpr int dq_blocks() const { return d / 8 / key_strips; }
  // The ring of query tiles.
  constexpr int stage_after(int stage) const { return stage + 1 == backs ? 0 : stage + 1; }
  constexpr int stage_before(int stage) const { return stage == 0 ? backs - 1 : stage - 1; }
  /// Tiles that are loaded ahead of the one that is computed.
  constexpr int ahead() const { return backs == 3 ? 2 : 1; }

  /// Whether the kernel can be built like this. Codes are kept, or starts stay on, only in the
  /// shapes that need it.
  constexpr bool valid() const {
    return kBlock % tile_k() == 0 && kBlock % tile_q() == 0 &&
           (fronts == backs || (fronts == 1 && backs == 2)) && !(holds_keys && fronts != 1) &&
           !(lists() && tile_q() != kListedQueries) && !(capped() && !general()) &&
           !(one_place && (fronts != 1 || backs != 1 || holds_keys)) &&
           !(keeps_codes && (key_strips != 2 || query_strips != 2)) &&
           !(starts_stay_on && (paper() || 2 * tile_k() != threads())) &&
           !(paper() && (lists() || capped() || dithers_dq()));
  }
};

template <Config kConfig>
inline constexpr CodeGeneration kCode = code_generation(kConfig.instance, kConfig.wants,
                                                        arch::kTarget);
/// Thread blocks that share the registers of a multiprocessor.
template <Config kConfig>
inline constexpr int kResident =
    kCode<kConfig>.resident != 0 ? kCode<kConfig>.resident : kConfig.resident;

/// The table. Each recipe and head dimension has a large instance for sm_90 and sm_100, and a
/// smaller one for sm_80, 86, 89 and 120, which have less shared memory (choose.cuh takes one).
constexpr Config config_of(Instance instance, unsigned wants) {
  using enum Instance;
  Config c{.instance = instance, .wants = wants};
  switch (instance) {
    case narrow:  // 64 queries x 64 keys; three small thread blocks of 60 KB
      c.resident = 3, c.keeps_codes = true;
      if (c.general() && c.dithers_dq()) c.resident = 2;  // it needs more registers
      break;
    case narrow_small:  // the same tile; two thread blocks of 48 KB, whose warps hold K and V
      c.resident = 2, c.keeps_codes = true;
      c.holds_keys = true;
      break;
    case wide:  // 64 queries x 128 keys; one thread block with three stages in 216 KB
      c.d = 128, c.starts_stay_on = true;
      c.key_strips = 4, c.fronts = c.backs = 3;
      break;
    case wide_small:  // half the keys and one stage
      c.d = 128, c.starts_stay_on = true;
      c.backs = 1;
      break;
    case wide_pair:  // the same tile for block lists; room for two thread blocks, of 104 KB
      c.d = 128, c.resident = 2, c.starts_stay_on = true;
      break;
    // The tiles of `paper` are part of the recipe: 128 queries x 64 keys.
    case paper_narrow:  // two thread blocks of 102 KB
      c.query_strips = 4, c.resident = 2;
      break;
    case paper_narrow_small:  // one thread block, whose warps hold K and V
      c.query_strips = 4, c.holds_keys = true;
      break;
    case paper_wide:  // one thread block of 174 KB
      c.d = 128, c.query_strips = 4;
      break;
    case paper_wide_small:  // one stage in 97 KB: nothing is loaded ahead
      c.d = 128, c.query_strips = 4;
      c.backs = 1, c.one_place = true;
      break;
  }
  return c;
}

}  // namespace sagebwd::cuda::sm80::fused_backward
