// SPDX-License-Identifier: Apache-2.0
// The interface between backends and dispatch: an implementation of attention as a table of
// functions. Nothing else of a backend is visible outside its room.
#pragma once

#include <cstddef>
#include <string>

#include "spec/problem.h"

namespace sagebwd::backend {

struct Tiles {
  int q, k;
  int p_levels;  // of the codes of P: 127 or 255
  int dk_q = q;  // queries of a tile that share a scale of dS for dK
};

/// For implementations that take any tiles: what the recipe asks for, or else 128x64 in `paper`,
/// and 64x128 with `most_p_levels` in `vectorwise`. A tile lies within one block of a list.
inline Tiles any_tiles(const spec::Problem& p, int most_p_levels) {
  const Recipe& r = p.recipe;
  const bool of_paper = r.scheme == Scheme::paper;
  const auto tile = [&](int wanted, int usual, int block) {
    if (wanted != 0) return wanted;
    return p.has_lists() && block % usual != 0 ? 64 : usual;
  };
  return {tile(r.tile_q, of_paper ? 128 : 64, p.blocks.block_q),
          tile(r.tile_k, of_paper ? 64 : 128, p.blocks.block_k),
          p.levels_of_p != 0 ? p.levels_of_p : spec::p_levels(r.scheme, most_p_levels)};
}

struct Implementation {
  const char* name;
  /// Why this implementation cannot serve the problem on this machine; empty when it can.
  std::string (*decline)(const spec::Problem&);
  /// The tile sizes it would use, and the levels of P.
  Tiles (*tiles)(const spec::Problem&);
  /// Bytes of workspace, not counting alignment of its start.
  size_t (*workspace)(const spec::Problem&);
  /// `workspace` is aligned to kWorkspaceAlign.
  void (*forward)(const spec::Problem&, const ForwardArgs&, void* workspace);
  void (*backward)(const spec::Problem&, const BackwardArgs&, void* workspace);
};

inline constexpr size_t kWorkspaceAlign = 64;

}  // namespace sagebwd::backend
