// SPDX-License-Identifier: Apache-2.0
// The pieces of work of the forward: up to kQueries queries of a head.
#pragma once

#include <cstdint>

#include "cuda/sm90/params.h"
#include "cuda/tile/sequence.cuh"
#include "cuda/tile/walk.cuh"

namespace sagebwd::cuda::sm90::fwd {

/// The tiles of keys that the 64 queries of one consumer see, from `begin` to `end`. Those from
/// whole_begin to whole_end need no mask.
struct Seen {
  int begin, whole_begin, whole_end, end;
};

/// A piece of work. It lies in shared memory; the producer writes it.
struct Work {
  tile::Walk walk;  // over tiles of keys
  int head;
  int q0, end;    // its queries, inside the sequence
  uint32_t row;   // the first query in the workspace, heads included
  uint32_t keys;  // the sequence's first key in the workspace, heads included
  bool last;      // there is no work in it, nor any after it
  tile::Sequence s;
};

/// How a sequence is cut into pieces. They are counted from its end: if one is short, it is the
/// first. Under a causal mask that one sees the fewest keys, so that few multiprocessors are ever
/// half idle.
struct Pieces {
  static constexpr int kQueries = 3 * kBlock / 2;
  int count;
  int missing;  // queries that the first one lacks, in whole consumers

  __host__ __device__ explicit Pieces(int nq)
      : count((nq + kQueries - 1) / kQueries), missing(count * kQueries - (nq + 63) / 64 * 64) {}
  /// Whether the first one comes behind those of all sequences: short ones fill the gaps at the
  /// end. Unless there are no others.
  __host__ __device__ bool first_is_late() const { return missing > 0 && count > 1; }
  __host__ __device__ int early() const { return count - first_is_late(); }
  __device__ int begin(int piece) const { return max(piece * kQueries - missing, 0); }
  __device__ int end(int piece) const { return (piece + 1) * kQueries - missing; }
};

/// What a consumer sees of a piece; nothing if it has none of its queries.
__device__ inline Seen seen_by(const Work& w, const MaskParams& mask, int consumer) {
  const int first = w.q0 + consumer * 64, last = min(first + 64, w.end) - 1;
  if (first > last) return {w.walk.first, 0, 0, w.walk.first};
  const tile::Walk walk = tile::walk_keys(mask, w.s, first, last, kBlock);
  const tile::WholeTiles whole = tile::whole_keys(mask, w.s, first, first + 63, kBlock);
  Seen seen;
  seen.begin = max(walk.first, w.walk.first), seen.end = seen.begin + walk.steps;
  seen.whole_begin = min(max(whole.begin, seen.begin), seen.end);
  seen.whole_end = min(max(whole.end, seen.whole_begin), seen.end);
  return seen;
}

/// Numbers of the pieces of a head. Early ones of all sequences come first, then a late one of each
/// sequence. Where sequences are packed, nobody knows how many pieces each has: then every block of
/// queries has a number, and every sequence, and some of them no piece.
struct Numbers {
  uint32_t early, late;
  __host__ __device__ explicit Numbers(const ForwardParams& p) {
    const Pieces pieces(static_cast<int>(p.seq.nq));
    const bool packed = p.seq.documents != nullptr;
    early = static_cast<uint32_t>(packed ? p.q_blocks : p.seq.count * pieces.early());
    late = static_cast<uint32_t>(packed || pieces.first_is_late() ? p.seq.count : 0);
  }
  __host__ __device__ uint32_t of_all_heads(const ForwardParams& p) const {
    return (early + late) * static_cast<uint32_t>(p.h);
  }
};

/// The sequence and the piece of an early number; false: there is none.
__device__ inline bool early_piece(Work& w, int& piece, const ForwardParams& p, int number) {
  if (p.seq.documents == nullptr) {
    const Pieces pieces(static_cast<int>(p.seq.nq));
    const int sequence = number / pieces.early();
    w.s = tile::sequence_at<kBlock>(p.seq, sequence);
    piece = number - sequence * pieces.early() + pieces.first_is_late();
    return true;
  }
  // Blocks have kBlock queries and pieces 1.5 times as many: of three blocks two have a piece.
  w.s = tile::sequence_of_block<kBlock>(p.seq, number, true);
  const int local = number - static_cast<int>(w.s.q_pad / kBlock);
  piece = local / 3 * 2 + local % 3;
  const Pieces pieces(w.s.nq);
  return local % 3 != 2 && piece < pieces.count && !(piece == 0 && pieces.first_is_late());
}

/// Piece `index` of all. Some heads go together (heads_together), and their last queries come
/// first: under a causal mask those have the most keys. Returns false where there is none.
__device__ inline bool work_at(Work& w, const ForwardParams& p, uint32_t index) {
  const uint32_t heads = static_cast<uint32_t>(p.h);
  const Numbers numbers(p);
  int piece = 0;
  if (index < heads * numbers.early) {
    const uint32_t together = static_cast<uint32_t>(p.heads_together),
                   first = index / (together * numbers.early) * together,
                   here = min(together, heads - first), at = index - first * numbers.early;
    w.head = static_cast<int>(first + at % here);
    if (!early_piece(w, piece, p, static_cast<int>(numbers.early - 1 - at / here))) return false;
  } else {
    const uint32_t at = index - heads * numbers.early;
    w.head = static_cast<int>(at % heads);
    w.s = tile::sequence_at<kBlock>(p.seq, static_cast<int>(at / heads));
    if (!Pieces(w.s.nq).first_is_late()) return false;
  }
  const Pieces pieces(w.s.nq);
  w.q0 = pieces.begin(piece), w.end = min(pieces.end(piece), w.s.nq);
  w.walk = tile::walk_keys(p.mask, w.s, w.q0, w.end - 1, kBlock);
  w.row = static_cast<uint32_t>(w.head * p.tq + w.s.q_pad + w.q0);
  w.keys = static_cast<uint32_t>(w.head / p.group * p.tk + w.s.k_pad);
  w.last = false;
  return true;
}

}  // namespace sagebwd::cuda::sm90::fwd
