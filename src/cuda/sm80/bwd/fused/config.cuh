// SPDX-License-Identifier: Apache-2.0
// Every instance of the fused backward, and everything that sets it apart: one table.
#pragma once

#include "cuda/arch/target.cuh"
#include "cuda/lists/lists.h"
#include "cuda/tile/layout.h"
#include "sagebwd/recipe.h"

namespace sagebwd::cuda::sm80::fused_backward {

// A warp computes 32 keys x 32 queries of a tile's scores. Keys are the rows of its accumulators.
inline constexpr int kWarpKeys = 32, kKeyBlocks = kWarpKeys / 16;
inline constexpr int kWarpQueries = 32, kQueryBlocks = kWarpQueries / 8;

/// Choices that change the registers and the order of instructions, never a result.
struct CodeGeneration {
  // Fragment addresses hold everything but a constant, instead of the lane's part alone.
  bool whole_addresses = false;
  // S and P of the next tile are computed beside the products of this one, and may mix with them.
  bool mixes_tiles = false;
  // Addresses that are computed again for every tile, so that they take no register in between.
  // Those of queries always are.
  bool renews_keys = false, renews_transposed = false;
  // All that follows from the thread's number is computed again for every tile.
  bool renews_index = false;
  // The loop reads the Walk from shared memory instead of keeping it in registers.
  bool walk_in_shared = false;
  // dQ comes before dV and dK. Their products then hide a part of its way to memory.
  bool dq_first = false;
  // It even comes before S of the next tile.
  bool dq_early = false;
  // A product that may not mix with its neighbours: mixed products need more registers.
  bool dv_apart = false, dk_apart = false, dq_apart = false;
  // Thread blocks that share the registers, if they do not suffice for those of the instance.
  int resident = 0;
};

/// By target. One that is left out takes another instance, and only the emulator runs this there.
struct Targets {
  CodeGeneration sm80 = {}, sm90 = {}, sm100 = {}, sm120 = {};

  constexpr CodeGeneration of(int target) const {
    if (target < 900) return sm80;
    if (target / 100 == 10) return sm100;
    if (target / 100 == 12) return sm120;
    return sm90;
  }
};

/// What a call may want of the kernel beside its recipe and head dimension.
enum class Policy {
  fast,     // nothing: dQ is added up in any order
  general,  // what it asks for: dQ in turn (turn.cuh), row sums of dS (row_sums.cuh)
  dither,   // the same, and codes that are rounded by dither (dither.cuh)
  // fast and general with the codes of dS for dQ rounded by dither (dither_dq.cuh)
  fast_dither_dq,
  general_dither_dq,
  // fast and general that walk block lists (cuda/lists)
  lists,
  general_lists,
  // general that caps logits (tile/softcap.cuh)
  general_capped,
};

/// One instance of the kernel.
struct Config {
  Scheme scheme;
  int d;  // channels, padded
  // A tile is key_strips x query_strips warps: the warps of a key strip have the same 32 keys, the
  // warps of a query strip the same 32 queries.
  int key_strips, query_strips;
  // Query tiles in shared memory: of what S and dP read (front), and of what dV and dK read (back).
  int fronts, backs;
  int resident;              // thread blocks on a multiprocessor
  bool holds_keys = false;   // a warp holds its rows of K and V in registers
  bool one_place = false;    // codes and back of a query tile lie where its front was
  bool keeps_codes = false;  // a warp reads only the codes of other warps from shared memory
  // The start of integer sums is added to dV and dK and comes off later (tile/codes.cuh).
  bool starts_stay_on = false;
  Policy policy = Policy::fast;  // fast, general or dither
  bool dithers_dq = false;       // the codes of dS for dQ alone are rounded by dither
  bool lists = false;            // walks block lists
  bool capped = false;           // logits are capped
  Targets fast = {}, general = {}, dither = {}, fast_dither_dq = {}, general_dither_dq = {},
          listed = {}, general_listed = {}, general_capped = {};  // by policy

  /// Whether V is given as codes with a scale per key.
  constexpr bool has_v_codes() const { return scheme == Scheme::vectorwise; }
  /// Whether K's scale is folded into dS, key by key. Otherwise the keys of a thread block share
  /// one, and it multiplies dQ, which saves a multiplication per score but takes registers.
  constexpr bool folds_k() const { return scheme == Scheme::paper || policy != Policy::fast; }
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

  constexpr CodeGeneration code_generation(int target) const {
    switch (policy) {
      case Policy::fast:
        return (lists ? listed : dithers_dq ? fast_dither_dq : fast).of(target);
      case Policy::general:
        return (lists        ? general_listed
                : dithers_dq ? general_dither_dq
                : capped     ? general_capped
                             : general)
            .of(target);
      default:
        return dither.of(target);
    }
  }
  /// Whether the kernel can be built like this. Codes are kept, or starts stay on, only in the
  /// shapes that need it.
  constexpr bool valid() const {
    return kBlock % tile_k() == 0 && kBlock % tile_q() == 0 &&
           (fronts == backs || (fronts == 1 && backs == 2)) && !(holds_keys && fronts != 1) &&
           !(lists && tile_q() != kListedQueries) &&
           !(one_place && (fronts != 1 || backs != 1 || holds_keys)) &&
           !(keeps_codes && (key_strips != 2 || query_strips != 2)) &&
           !(starts_stay_on && (scheme == Scheme::paper || 2 * tile_k() != threads()));
  }
};

template <Config kConfig>
inline constexpr CodeGeneration kCode = kConfig.code_generation(arch::kTarget);
/// Thread blocks that share the registers of a multiprocessor.
template <Config kConfig>
inline constexpr int kResident =
    kCode<kConfig>.resident != 0 ? kCode<kConfig>.resident : kConfig.resident;

// The table. Each recipe and head dimension has a large instance for sm_90 and sm_100, and smaller
// ones for sm_80, 86, 89 and 120, which have less shared memory (choose.cuh takes one).
// On sm_90 the code generation is what is fastest. On the others it is what compiles without
// spills, found by trying.

// 64 queries x 64 keys; three small thread blocks of 60 KB share a multiprocessor.
inline constexpr Config kNarrow{
    .scheme = Scheme::vectorwise,
    .d = 64,
    .key_strips = 2,
    .query_strips = 2,
    .fronts = 1,
    .backs = 2,
    .resident = 3,
    .keeps_codes = true,
    .fast = {.sm90 = {.mixes_tiles = true, .renews_keys = true, .dq_first = true},
             // The choices of sm_90 would spill 112 bytes here.
             .sm100 = {.whole_addresses = true,
                       .renews_keys = true,
                       .renews_transposed = true,
                       .walk_in_shared = true,
                       .dv_apart = true,
                       .dk_apart = true}},
    .general = {.sm90 = {.mixes_tiles = true, .dq_early = true},
                .sm100 = {.walk_in_shared = true, .dv_apart = true, .dk_apart = true}},
    .fast_dither_dq =
        {.sm90 = {.mixes_tiles = true, .renews_keys = true, .dq_first = true},
         .sm100 = {.mixes_tiles = true, .renews_keys = true, .dq_first = true, .resident = 2}},
    .general_dither_dq = {.sm90 = {.mixes_tiles = true, .dq_early = true},
                          .sm100 = {.walk_in_shared = true, .dv_apart = true, .dk_apart = true}},
    .listed = {.sm90 = {.mixes_tiles = true,
                        .walk_in_shared = true,
                        .dq_first = true,
                        .dv_apart = true,
                        .dk_apart = true},
               .sm100 = {.mixes_tiles = true, .dq_first = true, .resident = 2}},
    .general_listed =
        {.sm90 = {.mixes_tiles = true, .dq_early = true, .resident = 2},
         .sm100 = {.mixes_tiles = true, .renews_index = true, .dq_early = true, .resident = 2}},
    .general_capped =
        {.sm90 = {.walk_in_shared = true, .dv_apart = true, .dk_apart = true, .resident = 2},
         .sm100 = {.walk_in_shared = true, .dv_apart = true, .dk_apart = true, .resident = 2}},
};
// The same tile; two thread blocks of 48 KB. With fewer warps each has more registers, enough to
// hold K and V, and codes take their place in shared memory.
inline constexpr Config kNarrowSmall{
    .scheme = Scheme::vectorwise,
    .d = 64,
    .key_strips = 2,
    .query_strips = 2,
    .fronts = 1,
    .backs = 2,
    .resident = 2,
    .holds_keys = true,
    .keeps_codes = true,
    .fast = {.sm80 = {.renews_keys = true, .walk_in_shared = true},
             .sm120 = {.mixes_tiles = true, .renews_transposed = true, .dv_apart = true}},
    .general = {.sm80 = {.renews_keys = true, .walk_in_shared = true},
                .sm120 = {.mixes_tiles = true, .renews_transposed = true, .dv_apart = true}},
    .fast_dither_dq = {.sm80 = {.renews_keys = true},
                       .sm120 = {.mixes_tiles = true,
                                 .renews_transposed = true,
                                 .dv_apart = true,
                                 .dk_apart = true}},
    .general_dither_dq = {.sm80 = {.renews_keys = true, .walk_in_shared = true},
                          .sm120 = {.mixes_tiles = true,
                                    .renews_transposed = true,
                                    .dv_apart = true,
                                    .dk_apart = true}},
    .listed =
        {.sm80 = {.renews_keys = true, .walk_in_shared = true},
         .sm120 = {.walk_in_shared = true, .dq_early = true, .dv_apart = true, .dk_apart = true}},
    .general_listed =
        {.sm80 = {.renews_keys = true, .walk_in_shared = true},
         .sm120 = {.walk_in_shared = true, .dq_early = true, .dv_apart = true, .dk_apart = true}},
    .general_capped = {.sm80 = {.renews_keys = true, .walk_in_shared = true},
                       .sm120 = {.mixes_tiles = true,
                                 .renews_transposed = true,
                                 .dv_apart = true,
                                 .dk_apart = true}},
};

// 64 queries x 128 keys; one thread block with three stages in 216 KB.
inline constexpr Config kWide{
    .scheme = Scheme::vectorwise,
    .d = 128,
    .key_strips = 4,
    .query_strips = 2,
    .fronts = 3,
    .backs = 3,
    .resident = 1,
    .starts_stay_on = true,
    .fast = {.sm90 = {.whole_addresses = true, .mixes_tiles = true, .renews_transposed = true},
             // dV and dK mix with nothing, or this would spill.
             .sm100 = {.whole_addresses = true,
                       .mixes_tiles = true,
                       .renews_keys = true,
                       .renews_transposed = true,
                       .dv_apart = true,
                       .dk_apart = true}},
    .general = {.sm90 = {.mixes_tiles = true, .renews_index = true},
                .sm100 = {.whole_addresses = true,
                          .mixes_tiles = true,
                          .renews_keys = true,
                          .renews_transposed = true,
                          .dv_apart = true,
                          .dk_apart = true}},
    .fast_dither_dq = {.sm90 = {.whole_addresses = true,
                                .mixes_tiles = true,
                                .renews_transposed = true},
                       .sm100 = {.whole_addresses = true,
                                 .mixes_tiles = true,
                                 .renews_keys = true,
                                 .renews_transposed = true,
                                 .dk_apart = true,
                                 .dq_apart = true}},
    .general_dither_dq = {.sm90 = {.mixes_tiles = true, .renews_index = true},
                          .sm100 = {.whole_addresses = true,
                                    .mixes_tiles = true,
                                    .renews_keys = true,
                                    .renews_transposed = true,
                                    .dv_apart = true,
                                    .dk_apart = true}},
    .general_capped = {.sm90 = {.renews_keys = true,
                                .renews_transposed = true,
                                .walk_in_shared = true,
                                .dv_apart = true,
                                .dk_apart = true},
                       .sm100 = {.whole_addresses = true,
                                 .mixes_tiles = true,
                                 .renews_keys = true,
                                 .renews_transposed = true,
                                 .dv_apart = true,
                                 .dk_apart = true}},
};
// Half the keys and one stage.
inline constexpr Config kWideSmall{
    .scheme = Scheme::vectorwise,
    .d = 128,
    .key_strips = 2,
    .query_strips = 2,
    .fronts = 1,
    .backs = 1,
    .resident = 1,
    .starts_stay_on = true,
    // Tiles that mix would spill on sm_80, whole addresses on sm_120 but for dither of dQ.
    .fast = {.sm80 = {.whole_addresses = true,
                      .renews_transposed = true,
                      .dv_apart = true,
                      .dk_apart = true},
             .sm120 = {.mixes_tiles = true, .renews_transposed = true}},
    .general = {.sm80 = {.dv_apart = true, .dk_apart = true},
                .sm120 = {.mixes_tiles = true, .renews_index = true, .dq_early = true}},
    .fast_dither_dq = {.sm80 = {.whole_addresses = true,
                                .renews_transposed = true,
                                .dv_apart = true,
                                .dk_apart = true},
                       .sm120 = {.whole_addresses = true,
                                 .mixes_tiles = true,
                                 .renews_transposed = true}},
    .general_dither_dq = {.sm80 = {.walk_in_shared = true, .dk_apart = true},
                          .sm120 = {.mixes_tiles = true, .renews_index = true, .dq_early = true}},
    .listed = {.sm80 = {.whole_addresses = true,
                        .renews_keys = true,
                        .renews_transposed = true,
                        .dv_apart = true,
                        .dk_apart = true},
               .sm120 = {.mixes_tiles = true, .renews_transposed = true}},
    .general_listed = {.sm80 = {.dv_apart = true, .dk_apart = true},
                       .sm120 = {.renews_index = true,
                                 .walk_in_shared = true,
                                 .dq_first = true,
                                 .dv_apart = true,
                                 .dk_apart = true}},
    .general_capped = {.sm80 = {.dv_apart = true, .dk_apart = true},
                       .sm120 = {.dv_apart = true, .dk_apart = true}},
};
// The same tile for block lists where there is room for two thread blocks, of 104 KB.
inline constexpr Config kWidePair{
    .scheme = Scheme::vectorwise,
    .d = 128,
    .key_strips = 2,
    .query_strips = 2,
    .fronts = 1,
    .backs = 2,
    .resident = 2,
    .starts_stay_on = true,
    .listed = {.sm90 = {.whole_addresses = true, .mixes_tiles = true, .renews_transposed = true},
               .sm100 = {.renews_transposed = true, .dv_apart = true, .dk_apart = true}},
    .general_listed = {.sm90 = {.renews_transposed = true, .dv_apart = true, .dk_apart = true},
                       .sm100 = {.renews_transposed = true,
                                 .walk_in_shared = true,
                                 .dv_apart = true,
                                 .dk_apart = true}},
};

// The tiles of `paper` are part of the recipe: 128 queries x 64 keys. Two thread blocks of 102 KB.
inline constexpr Config kPaperNarrow{
    .scheme = Scheme::paper,
    .d = 64,
    .key_strips = 2,
    .query_strips = 4,
    .fronts = 1,
    .backs = 2,
    .resident = 2,
    .fast = {.sm90 = {.mixes_tiles = true, .renews_keys = true},
             // The choices of sm_90 would spill 156 bytes here.
             .sm100 = {.renews_transposed = true,
                       .walk_in_shared = true,
                       .dk_apart = true,
                       .dq_apart = true}},
    .general = {.sm90 = {.renews_keys = true, .renews_transposed = true},
                .sm100 = {.renews_transposed = true,
                          .walk_in_shared = true,
                          .dk_apart = true,
                          .dq_apart = true}},
    .dither = {.sm80 = {.mixes_tiles = true, .renews_keys = true},
               .sm90 = {.mixes_tiles = true, .renews_keys = true},
               .sm100 = {.mixes_tiles = true, .renews_keys = true}},
};
// One thread block, whose warps hold K and V.
inline constexpr Config kPaperNarrowSmall{
    .scheme = Scheme::paper,
    .d = 64,
    .key_strips = 2,
    .query_strips = 4,
    .fronts = 1,
    .backs = 2,
    .resident = 1,
    .holds_keys = true,
    .fast = {.sm80 = {.mixes_tiles = true, .renews_keys = true},
             .sm120 = {.mixes_tiles = true, .renews_keys = true}},
    .general = {.sm80 = {.mixes_tiles = true, .renews_keys = true},
                .sm120 = {.mixes_tiles = true, .renews_keys = true}},
    .dither = {.sm80 = {.mixes_tiles = true, .renews_keys = true},
               .sm120 = {.mixes_tiles = true, .renews_keys = true}},
};
// One thread block of 174 KB. Tiles that mix would spill.
inline constexpr Config kPaperWide{
    .scheme = Scheme::paper,
    .d = 128,
    .key_strips = 2,
    .query_strips = 4,
    .fronts = 1,
    .backs = 2,
    .resident = 1,
    .fast = {.sm90 = {.renews_keys = true, .renews_transposed = true},
             .sm100 = {.renews_keys = true, .renews_transposed = true}},
    .general = {.sm90 = {.renews_keys = true, .renews_transposed = true},
                .sm100 = {.renews_keys = true, .renews_transposed = true}},
    .dither = {.sm90 = {.renews_keys = true, .renews_transposed = true},
               .sm100 = {.renews_keys = true, .renews_transposed = true}},
};
// One stage in 142 KB, for sm_80.
inline constexpr Config kPaperWideSmall{
    .scheme = Scheme::paper,
    .d = 128,
    .key_strips = 2,
    .query_strips = 4,
    .fronts = 1,
    .backs = 1,
    .resident = 1,
    .fast = {.sm80 = {.renews_keys = true, .renews_transposed = true}},
    .general = {.sm80 = {.renews_keys = true, .renews_transposed = true}},
    .dither = {.sm80 = {.renews_keys = true, .renews_transposed = true}},
};

// One stage in 97 KB, for sm_86, 89 and 120: nothing is loaded ahead.
inline constexpr Config kPaperWideTiny{
    .scheme = Scheme::paper,
    .d = 128,
    .key_strips = 2,
    .query_strips = 4,
    .fronts = 1,
    .backs = 1,
    .resident = 1,
    .one_place = true,
    .fast = {.sm80 = {.renews_keys = true, .renews_transposed = true},
             .sm120 = {.renews_index = true, .dq_early = true}},
    .general = {.sm80 = {.renews_keys = true, .renews_transposed = true},
                .sm120 = {.renews_index = true}},
    .dither = {.sm80 = {.renews_keys = true, .renews_transposed = true},
               .sm120 = {.renews_index = true}},
};

/// The names by which the host knows the instances: nvcc cannot launch a kernel whose template
/// parameter is a structure.
enum class Instance {
  narrow,
  narrow_small,
  wide,
  wide_small,
  paper_narrow,
  paper_narrow_small,
  paper_wide,
  paper_wide_small,
  paper_wide_tiny,
  wide_pair,
};
constexpr Config table(Instance instance) {
  switch (instance) {
    case Instance::narrow:
      return kNarrow;
    case Instance::narrow_small:
      return kNarrowSmall;
    case Instance::wide:
      return kWide;
    case Instance::wide_small:
      return kWideSmall;
    case Instance::paper_narrow:
      return kPaperNarrow;
    case Instance::paper_narrow_small:
      return kPaperNarrowSmall;
    case Instance::paper_wide:
      return kPaperWide;
    case Instance::paper_wide_small:
      return kPaperWideSmall;
    case Instance::paper_wide_tiny:
      return kPaperWideTiny;
    default:
      return kWidePair;
  }
}
constexpr Config config_of(Instance instance, Policy policy) {
  Config config = table(instance);
  config.dithers_dq = policy == Policy::fast_dither_dq || policy == Policy::general_dither_dq;
  config.capped = policy == Policy::general_capped;
  config.lists = policy == Policy::lists || policy == Policy::general_lists;
  config.policy = policy == Policy::fast_dither_dq || policy == Policy::lists ? Policy::fast
                  : policy == Policy::general_dither_dq || policy == Policy::general_lists ||
                          policy == Policy::general_capped
                      ? Policy::general
                      : policy;
  // These need more registers.
  if (policy == Policy::dither) config.resident = 1;
  if (policy == Policy::general_dither_dq && instance == Instance::narrow) config.resident = 2;
  return config;
}

}  // namespace sagebwd::cuda::sm80::fused_backward
