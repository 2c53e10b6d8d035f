// SPDX-License-Identifier: Apache-2.0
// The pieces of work of the operand kernel. For each key head the list has the means of the next
// head, then the codes of this one:
//
//   means 0 | means 1, codes 0 | means 2, codes 1 | … | codes last
//
// A thread block asks for the rows of a piece while it works on the piece before it. Means and
// codes both read K and V. With this order K and V are still in the second-level cache when their
// codes are made, and codes rarely wait for their mean. A piece waits only for pieces that were
// handed out before it, and a thread block works on its pieces in that order. So the oldest piece
// that is not done waits for nothing, and there is no deadlock.
//
// To find out where a piece lies takes one thread longer than 256 take for the piece. So a kernel
// before this one writes a table of all pieces (prepare.cu).
#pragma once

#include <cstdint>

#include "cuda/quantize/mean.cuh"
#include "cuda/quantize/quantize.h"
#include "cuda/tile/sequence.cuh"

namespace sagebwd::cuda {

/// scales: the largest scales of blocks of K and V whose codes need no work.
enum class Kind { none, k_mean, v_mean, scales, keys, values, queries };

inline constexpr int kScaleBlocks = 32;  // of a piece of scales

struct alignas(16) Item {
  Kind kind;
  int head;     // a query head for queries, else a key head
  int kv_head;  // its key head
  int block;    // of tokens; for means the first of a span (mean.cuh)
  tile::Sequence s;
  int first, left;       // the block's first token, and the tokens from there to the sequence's end
  Source from, dout, o;  // rows of the block: K, V or Q, or their saved codes; dO and O beside Q
};
static_assert(sizeof(Item) == kItemBytes);

/// Pieces of work of one key head.
struct Counts {
  int spans, means, scales, keys, values, codes;
  __host__ __device__ explicit Counts(const OperandJob& job) {
    spans = (job.k_blocks + kMeanBlocks - 1) / kMeanBlocks;
    means = spans * ((job.k_mean.mean != nullptr) + (job.v_mean.mean != nullptr));
    scales = job.keys_are_ready ? (job.k_blocks + kScaleBlocks - 1) / kScaleBlocks : 0;
    keys = job.keys_are_ready ? 0 : job.k_blocks;
    values = job.v8t != nullptr || job.v8 != nullptr || job.v16 != nullptr ? keys : 0;
    codes = scales + keys + values + job.group * job.q_blocks;
  }
  /// Of all key heads.
  __host__ __device__ int64_t all(const OperandJob& job) const {
    return static_cast<int64_t>(job.hk) * (means + codes);
  }
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
  if (job.backward && queries) {
    item.dout = source_of(job.dout, s, item.head, token);
    item.o = source_of(job.o, s, item.head, token);
  }
}

__device__ inline Item item_at(const OperandJob& job, uint32_t index) {
  const Counts n(job);
  const uint32_t means = static_cast<uint32_t>(n.means), codes = static_cast<uint32_t>(n.codes);
  const uint32_t last = static_cast<uint32_t>(job.hk) - 1;
  Item item{};
  item.kind = Kind::none;
  uint32_t head = 0, at = index;
  bool is_mean = index < means;
  if (!is_mean) {
    const uint32_t behind = index - means;
    head = min(job.head_pieces.divide(behind), last);
    at = behind - head * (means + codes);
    const uint32_t before = head == last ? 0 : means;
    is_mean = at < before;
    if (is_mean)
      ++head;
    else
      at -= before;
    if (!is_mean && at >= codes) return item;
  }
  item.head = item.kv_head = static_cast<int>(head), item.block = static_cast<int>(at);
  if (is_mean) {
    const bool of_k = job.k_mean.mean != nullptr && item.block < n.spans;
    item.kind = of_k ? Kind::k_mean : Kind::v_mean;
    if (!of_k && job.k_mean.mean != nullptr) item.block -= n.spans;
    item.block *= kMeanBlocks;
  } else if (item.block < n.scales) {
    item.kind = Kind::scales;
    item.block *= kScaleBlocks;
  } else if (item.block < n.scales + n.keys + n.values) {
    item.block -= n.scales;
    item.kind = item.block < n.keys ? Kind::keys : Kind::values;
    if (item.kind == Kind::values) item.block -= n.keys;
  } else {
    const int q = item.block - n.scales - n.keys - n.values;
    item.kind = Kind::queries;
    const int member = job.head_q_blocks.divide(q);
    item.head = item.head * job.group + member, item.block = q - member * job.q_blocks;
  }
  locate(job, item);
  return item;
}

}  // namespace sagebwd::cuda
