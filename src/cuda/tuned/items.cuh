// SPDX-License-Identifier: Apache-2.0
// The pieces of work of the operand kernel. A portion of them belongs to one key head of a
// sequence; packed sequences count as one. In `paper` K has means: for each portion the list has
// those of a later one, then its own codes. Here means are one portion ahead (OperandJob::lead):
//
//   means 0 | means 1, codes 0 | means 2, codes 1 | … | codes last
//
// A thread block asks for the rows of a piece while it works on the piece before it. Means and
// codes both read K. With this order K is still in the second-level cache when its codes are made,
// and codes rarely wait for their mean: where many pieces are under way at the same time, means are
// further ahead. A piece waits only for pieces that were handed out before it, and
// a thread block works on its pieces in that order. So the oldest piece that is not done waits for
// nothing, and there is no deadlock.
//
// To find out where a piece lies takes one thread longer than 256 take for the piece. So a kernel
// before this one writes a table of all pieces (prepare.cu).
#pragma once

#include <cstdint>

#include "cuda/tile/sequence.cuh"
#include "cuda/tuned/operands.h"
#include "cuda/tuned/rows.cuh"
#include "cuda/tuned/runs.cuh"

namespace sagebwd::cuda::tuned {

enum class Kind { none, k_mean, keys, values, queries };

struct alignas(16) Item {
  Kind kind;
  int head;     // a query head for queries, else a key head
  int kv_head;  // its key head
  int block;    // of tokens; for means the first of several
  int end;      // the block behind the last of these
  tile::Sequence s;
  int first, left;  // the block's first token, and the tokens from there to the sequence's end
  Source from;      // rows of the block: K, V or Q, or their saved codes
};
static_assert(sizeof(Item) == kItemBytes);

/// Pieces of work of a portion.
struct Counts {
  int k_blocks, q_blocks, spans, means, values, codes;
  int64_t portions;
  __host__ __device__ explicit Counts(const OperandJob& job) {
    const bool packed = job.seq.documents != nullptr;
    k_blocks = packed ? job.k_blocks : job.seq.k_blocks;
    q_blocks = packed ? job.q_blocks : job.seq.q_blocks;
    portions = static_cast<int64_t>(job.hk) * (packed ? 1 : job.seq.count);
    spans = (k_blocks + kMeanBlocks - 1) / kMeanBlocks;
    means = job.k_mean.mean != nullptr ? spans : 0;
    values = job.makes_values ? k_blocks : 0;
    codes = k_blocks + values + job.group * q_blocks;
  }
  __host__ __device__ int64_t all() const { return portions * (means + codes); }
};

/// Finds the sequence and the rows of a piece of work.
__device__ inline void locate(const OperandJob& job, Item& item) {
  const bool queries = item.kind == Kind::queries,
             of_k = item.kind == Kind::keys || item.kind == Kind::k_mean;
  tile::Sequence& s = item.s;
  if (job.seq.documents == nullptr) {
    const Divisor& blocks = queries ? job.q_blocks_each : job.k_blocks_each;
    s = tile::sequence_at<kBlock>(job.seq, blocks.divide(item.block));
  } else {
    s = tile::sequence_of_block<kBlock>(job.seq, item.block, queries);
  }
  item.first =
      static_cast<int>(static_cast<int64_t>(item.block) * kBlock - (queries ? s.q_pad : s.k_pad));
  item.left = (queries ? s.nq : s.nk) - item.first;
  const int64_t token = (queries ? s.q_begin : s.k_begin) + item.first;
  if (job.backward && job.saved.q8 != nullptr) {
    const int8_t* codes = queries ? job.saved.q8 : of_k ? job.saved.k8 : job.saved.v8;
    const int64_t row = item.head * (queries ? job.saved.queries : job.saved.keys) +
                        s.batch * (queries ? job.seq.nq : job.seq.nk) + token;
    item.from = {reinterpret_cast<const uint8_t*>(codes + row * job.d), job.d, true};
  } else {
    item.from = source_of(queries ? job.q : of_k ? job.k : job.v, s, item.head, token);
  }
}

__device__ inline Item item_at(const OperandJob& job, uint32_t index) {
  const Counts n(job);
  const uint32_t means = static_cast<uint32_t>(n.means), codes = static_cast<uint32_t>(n.codes);
  const uint32_t portions = static_cast<uint32_t>(n.portions),
                 lead = static_cast<uint32_t>(job.lead), with_means = portions - lead,
                 first_codes = lead * means,
                 last_codes = first_codes + with_means * (means + codes);
  Item item{};
  item.kind = Kind::none;
  uint32_t portion, at;
  bool is_mean = index < first_codes;
  if (is_mean) {
    portion = job.by_means.divide(index), at = index - portion * means;
  } else if (index < last_codes) {
    portion = job.by_pieces.divide(index - first_codes);
    at = index - first_codes - portion * (means + codes);
    is_mean = at < means;
    is_mean ? portion += lead : at -= means;
  } else {
    portion = job.by_codes.divide(index - last_codes);
    at = index - last_codes - portion * codes, portion += with_means;
    if (portion >= portions || at >= codes) return item;
  }
  // Heads first: in the caller's memory they may lie side by side.
  const int sequence = static_cast<int>(job.by_hk.divide(portion)), first_k = sequence * n.k_blocks,
            end_k = first_k + n.k_blocks;
  item.head = item.kv_head = static_cast<int>(portion) - sequence * job.hk;
  int i = static_cast<int>(at);
  if (is_mean) {
    item.kind = Kind::k_mean;
    item.block = first_k + i * kMeanBlocks, item.end = min(item.block + kMeanBlocks, end_k);
  } else if (i < n.k_blocks) {
    item.kind = Kind::keys, item.block = first_k + i;
  } else if (i -= n.k_blocks; i < n.values) {
    item.kind = Kind::values, item.block = first_k + i;
  } else {
    i -= n.values;
    item.kind = Kind::queries;
    const int member = job.by_q_blocks.divide(i);
    item.head = item.head * job.group + member;
    item.block = sequence * n.q_blocks + i - member * n.q_blocks;
  }
  locate(job, item);
  return item;
}

}  // namespace sagebwd::cuda::tuned
