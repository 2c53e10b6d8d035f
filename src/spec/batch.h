// SPDX-License-Identifier: Apache-2.0
// What every problem has: heads and tokens, documents and block lists. They have been checked.
#pragma once

#include <cstdint>

#include "sagebwd/attention.h"

namespace sagebwd::spec {

enum class Direction { forward, backward };

/// One attention problem of its own: a batch entry, or a document of a packed batch.
struct Sequence {
  int64_t batch;    // index into the batch dimension of the views
  int64_t q_begin;  // first token along the token dimension
  int64_t nq;
  int64_t k_begin;
  int64_t nk;
};

struct Batch {
  Direction direction;
  Device device;
  Dtype dtype;
  int64_t b, h, hk;
  int64_t d;       // head dim of q and k
  int64_t nq, nk;  // per batch entry; totals when packed
  Documents documents;
  BlockLists blocks;

  bool packed() const { return documents.count > 0; }
  bool has_lists() const { return blocks.rows > 0; }
  bool has_queries() const { return b > 0 && h > 0 && nq > 0; }
  bool has_keys() const { return b > 0 && hk > 0 && nk > 0; }
  int64_t group() const { return h / hk; }  // query heads per key head
  int64_t num_sequences() const { return packed() ? documents.count : b; }
  /// With documents on the device nobody on the host knows this.
  Sequence sequence(int64_t t) const {
    if (!packed()) return {t, 0, nq, 0, nk};
    const Documents& s = documents;
    return {0, s.cu_q[t], s.cu_q[t + 1] - s.cu_q[t], s.cu_k[t], s.cu_k[t + 1] - s.cu_k[t]};
  }
};

/// No address space holds more elements, and products of sizes stay far from overflow below it.
inline constexpr int64_t kMostElements = int64_t{1} << 47;

/// Sizes, dtype and device. Throws Error(invalid_argument) with what was expected and what came.
Batch resolve_batch(const TensorView& q, const TensorView& k, Device device, Direction direction);

/// Throws Error(invalid_argument) unless a head dim is one that the library serves.
void check_head_dim(const char* name, int64_t d);

}  // namespace sagebwd::spec
