// SPDX-License-Identifier: Apache-2.0
// Which keys a ticket of the backward stands for, where thread blocks add to dQ in turn
// (sm80/bwd/fused/turn.cuh, sm90/bwd/turns.cuh).
//
// A lineup is the key blocks of a key head that may wait for each other: those of a sequence, or
// all of them where documents are packed. In a lineup the last keys have the lowest ticket.
//
// Lineup after lineup, all key blocks of a head would start together, under a full mask at the same
// query tile, and each would wait for the one before it. So tickets go round a wave of lineups:
// when a key block starts, the one before it is some tiles ahead. At any time a query tile has one
// thread block that adds to it, so a wave has as many query tiles as thread blocks run, and some to
// spare.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "cuda/tile/sequences.h"

namespace sagebwd::cuda::tile {

struct Tickets {
  // Query tiles of a wave for each thread block that a multiprocessor holds: twice the
  // multiprocessors of a large GPU. Many more would push queries out of the L2 cache.
  static constexpr uint32_t kTiles = 384;

  uint32_t heads, lineups;
  uint32_t length;  // key blocks of a lineup
  uint32_t width;   // lineups of a wave; the last wave may have fewer

  /// p: the parameters of the kernel. grid: key blocks of a head x key heads. resident: thread
  /// blocks on a multiprocessor.
  template <typename Params>
  __device__ Tickets(const Params& p, const dim3& grid, int tile_q, int resident) {
    const uint32_t sequences = p.seq.documents == nullptr ? p.seq.count : 1,
                   queries = static_cast<uint32_t>(p.tq / p.seq.count),
                   tiles = max(queries / tile_q * p.group, 1u);
    heads = grid.y, lineups = heads * sequences, length = grid.x / sequences;
    const uint32_t most = p.turns == nullptr ? 1 : (kTiles * resident + tiles - 1) / tiles,
                   waves = (lineups + most - 1) / most;
    width = (lineups + waves - 1) / waves;
  }
  struct Keys {
    uint32_t block, head;
  };
  __device__ Keys keys_of(uint32_t ticket) const {
    const uint32_t wave = ticket / (width * length), in_wave = ticket - wave * width * length,
                   lineups_here = min(width, lineups - wave * width),
                   lineup = wave * width + in_wave % lineups_here, sequence = lineup / heads;
    return {(sequence + 1) * length - 1 - in_wave / lineups_here, lineup % heads};
  }
};

}  // namespace sagebwd::cuda::tile
