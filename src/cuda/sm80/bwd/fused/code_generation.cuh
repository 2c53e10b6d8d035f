// SPDX-License-Identifier: Apache-2.0
// How code for the instances of the fused backward is made on each target.
#pragma once

namespace sagebwd::cuda::sm80::fused_backward {

/// The names by which the host knows the instances (config.cuh): nvcc cannot launch a kernel whose
/// template parameter is a structure.
enum class Instance {
  narrow,
  narrow_small,
  wide,
  wide_small,
  wide_pair,
  paper_narrow,
  paper_narrow_small,
  paper_wide,
  paper_wide_small,
};

/// What a call may want of the kernel beside its recipe and head dimension, bits of `wants`.
/// kGeneral: dQ in turn (turn.cuh), row sums of dS (row_sums.cuh), as far as the call asks for
/// them. A kernel without it is a little faster, and there is one on Hopper
/// alone, where that was measured; other targets serve all calls with it.
inline constexpr unsigned kGeneral = 1;
/// Codes of dS for dQ are rounded by dither (dither_dq.cuh); on Hopper alone too.
inline constexpr unsigned kDitherDq = 2;
inline constexpr unsigned kLists = 4;   // walks block lists (cuda/lists)
inline constexpr unsigned kCapped = 8;  // logits are capped (tile/softcap.cuh); with kGeneral
inline constexpr unsigned kPaper = 16;  // recipe `paper`

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
  bool dv_apart = false, dk_apart = false;
  // The scales of dQ's keys and of the codes of dS meet once for all warps, behind the
  // codes, where there are registers for it.
  bool shares_dq_scales = false;
  // Thread blocks that share the registers, if they do not suffice for those of the instance.
  int resident = 0;
};

/// sm_90: what was measured to be fastest.
constexpr CodeGeneration for_hopper(Instance instance, unsigned wants) {
  const bool general = (wants & kGeneral) != 0, lists = (wants & kLists) != 0,
             capped = (wants & kCapped) != 0;
  switch (instance) {
    case Instance::narrow:
      if (capped)
        return {.walk_in_shared = true, .dv_apart = true, .dk_apart = true, .resident = 2};
      if (lists && general) return {.mixes_tiles = true, .dq_early = true, .resident = 2};
      if (lists)
        return {.mixes_tiles = true,
                .walk_in_shared = true,
                .dq_first = true,
                .dv_apart = true,
                .dk_apart = true};
      if (general) return {.mixes_tiles = true, .dq_early = true};
      return {.mixes_tiles = true, .renews_keys = true, .dq_first = true};
    case Instance::wide:
      if (capped)
        return {.renews_keys = true,
                .renews_transposed = true,
                .walk_in_shared = true,
                .dv_apart = true,
                .dk_apart = true,
                .shares_dq_scales = true};
      if (general) return {.mixes_tiles = true, .renews_index = true};
      return {.whole_addresses = true, .mixes_tiles = true, .renews_transposed = true};
    case Instance::wide_pair:
      if (general) return {.renews_transposed = true, .dv_apart = true, .dk_apart = true};
      return {.whole_addresses = true, .mixes_tiles = true, .renews_transposed = true};
    case Instance::paper_narrow:
      if (!general) return {.mixes_tiles = true, .renews_keys = true};
      return {.renews_keys = true, .renews_transposed = true};
    default:  // paper_wide: tiles that mix would spill
      return {.renews_keys = true, .renews_transposed = true};
  }
}

/// The other targets, which nobody has measured: one choice each that needs few registers.
constexpr CodeGeneration code_generation(Instance instance, unsigned wants, int target) {
  if (target / 10 == 90) return for_hopper(instance, wants);
  CodeGeneration few{.walk_in_shared = true, .dv_apart = true, .dk_apart = true};
  if (target / 100 == 12) {
    few.dq_early = true;
    few.renews_index = (wants & kLists) != 0;
    few.shares_dq_scales = (wants & kPaper) == 0;
    return few;
  }
  few.renews_keys = true;
  if (target / 100 == 10) {
    few.renews_transposed = true;
    if (instance == Instance::narrow) few.resident = 2;
    if (instance == Instance::paper_narrow) few.resident = 1;
  }
  return few;
}

}  // namespace sagebwd::cuda::sm80::fused_backward
