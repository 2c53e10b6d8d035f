// SPDX-License-Identifier: Apache-2.0
// How a problem is cut into blocks, and where everything lies in the workspace.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <utility>

#include "backend/implementation.h"
#include "base/math.h"
#include "base/parallel.h"
#include "cpu/isa/kernels.h"
#include "cpu/lists.h"
#include "spec/problem.h"

namespace sagebwd::cpu {

/// Hands out 64-byte aligned pieces of the workspace. With a null base it only counts.
class Arena {
 public:
  explicit Arena(void* base) : base_(static_cast<char*>(base)) {}
  template <typename T>
  T* take(int64_t count) {
    const size_t at = used_;
    used_ += static_cast<size_t>(round_up(count * static_cast<int64_t>(sizeof(T)), 64));
    return base_ == nullptr ? nullptr : reinterpret_cast<T*>(base_ + at);
  }
  size_t used() const { return used_; }

 private:
  char* base_;
  size_t used_ = 0;
};

/// A block of queries or keys of one sequence.
struct Block {
  spec::Sequence seq;
  int64_t sequence;  // index of seq
  int64_t index;     // of the block inside its sequence
  int64_t first;     // first token inside its sequence
  int rows;          // tokens it really has
};

/// Sizes that follow from the problem. Blocks are numbered through all sequences.
struct Plan {
  Plan(const spec::Problem& problem, const isa::Kernels& kernels);

  const spec::Problem& p;
  int bq, bk;
  float p_levels;  // of the codes of P
  int dl, dk;      // head dim of q and k, padded to whole vectors and to an INT8 contraction
  int vl, vk;      // head dim of v and o, likewise
  bool dp_bf16;    // backward: dP multiplies BF16, which both V (or its codes) and dO are exact in
  int64_t num_sequences, q_blocks, k_blocks;
  int64_t most_query_blocks = 0;  // of one sequence
  int octaves = 0;   // `vectorwise`: most octaves of keys of a sequence (numerics/octaves.h)
  int chunks;        // backward: key blocks kb with kb % chunks == c share one partial sum of dQ
  bool whole_heads;  // backward: one item takes all chunks of a key head, one after the other
  int slots;         // workers that run at once, each with its own scratch memory
  int64_t *q_start = nullptr,
          *k_start = nullptr;      // [num_sequences + 1] first block of each sequence
  int64_t* scale_start = nullptr;  // [num_sequences + 1] likewise, of blocks of kKeysPerScale keys
  ListTables lists;

  bool paper() const { return p.recipe.scheme == Scheme::paper; }
  /// Whether V has centres, from octave kFirstValueCentre on.
  /// Saved codes have them, whatever the recipe says, though they may be zero.
  bool centres_v() const { return spec::folds_v(p.recipe) && (p.recipe.smooth_k || reads_codes()); }
  /// Octaves in whole rows of a product.
  int centre_rows() const { return static_cast<int>(round_up(octaves, 4)); }
  /// Of scratch rows that hold either kind.
  int longest_l() const { return dl > vl ? dl : vl; }
  int longest_k() const { return dk > vk ? dk : vk; }
  void place_tables(Arena& arena);
  void fill_tables();
  Block query_block(int64_t block) const { return find(q_start, block, bq, true); }
  Block key_block(int64_t block) const { return find(k_start, block, bk, false); }
  /// The number of the first block of kKeysPerScale keys of a sequence.
  int64_t scale_block_start(int64_t sequence) const { return scale_start[sequence]; }
  int64_t key_blocks_of(int64_t sequence) const {
    return k_start[sequence + 1] - k_start[sequence];
  }
  /// Codes that the forward leaves for a backward, which takes them instead of q, k and v.
  bool writes_codes() const { return p.has_codes && p.direction == spec::Direction::forward; }
  bool reads_codes() const { return p.has_codes && p.direction == spec::Direction::backward; }
  /// Partial sums of dQ that are kept apart until the end.
  int partials() const { return whole_heads ? 1 : chunks; }

 private:
  Block find(const int64_t* start, int64_t block, int tile, bool queries) const;
};

backend::Tiles tiles_of(const spec::Problem& p, const isa::Kernels& kernels);

/// Runs body(slot, item) for every item. A slot is used by one thread at a time, so it can own
/// scratch memory.
template <typename F>
void run_items(const ParallelFor& pf, int slots, int64_t items, F&& body) {
  std::atomic<int64_t> next{0};
  const int64_t workers = items < slots ? items : slots;
  parallel_for(pf, workers, [&](int64_t slot) {
    for (int64_t i = next++; i < items; i = next++) body(slot, i);
  });
}

template <typename F>
void run_items(const ParallelFor& pf, const Plan& plan, int64_t items, F&& body) {
  run_items(pf, plan.slots, items, std::forward<F>(body));
}

/// Slots of a call. The caller's pool may have any number of threads; more than the machine has
/// would not help.
int worker_slots();

/// Address of token n of head h.
inline char* row_at(const TensorView& t, int64_t b, int64_t h, int64_t n) {
  const int64_t element = b * t.stride[0] + h * t.stride[1] + n * t.stride[2];
  return static_cast<char*>(t.data) + element * dtype_size(t.dtype);
}

inline float* stat_at(const StatsView& s, int64_t b, int64_t h, int64_t n) {
  return s.data + b * s.stride[0] + h * s.stride[1] + n * s.stride[2];
}

}  // namespace sagebwd::cpu
