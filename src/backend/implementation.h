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
};

/// For implementations that take any tiles: what the recipe asks for, or else 128x64 in `paper`,
/// and 64x128 with `most_p_levels` in `vectorwise`.
inline Tiles any_tiles(const Recipe& r, int most_p_levels) {
  const bool of_paper = r.scheme == Scheme::paper;
  const auto or_else = [](int wanted, int otherwise) { return wanted != 0 ? wanted : otherwise; };
  return {or_else(r.tile_q, of_paper ? 128 : 64), or_else(r.tile_k, of_paper ? 64 : 128),
          spec::p_levels(r, most_p_levels)};
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
