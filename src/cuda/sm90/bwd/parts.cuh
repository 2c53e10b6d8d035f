// SPDX-License-Identifier: Apache-2.0
// Walks in parts. Where there are fewer thread blocks than multiprocessors, or where a few are left
// for the last round, several share the keys of one: each walks over a part of the queries, and the
// last to finish adds up the sums of all parts. It adds them in the order of the parts, its own
// included, so that dK and dV have the same bits each time.
#pragma once

#include <cstdint>

#include "cuda/sm90/bwd/work.cuh"

namespace sagebwd::cuda::sm90::bwd {

/// Sums of dV and dK in memory, those of the threads of a consumer side by side. Single numbers:
/// vectors would want them in neighbouring registers, and the loop over tiles has no room for that.
template <int D>
struct PartSums {
  static constexpr int kSums = D / 2;  // of dV or of dK
  static constexpr int64_t kConsumer = 2 * kSums * kWarpgroup, kPart = kConsumer * kConsumers;
  float* at;  // the thread's first

  __device__ PartSums(float* memory, int part, int consumer, uint32_t thread)
      : at(memory + part * kPart + consumer * kConsumer + thread) {}

  __device__ void put(int first, const float (&x)[kSums]) const {
#pragma unroll
    for (int i = 0; i < kSums; ++i) at[(first + i) * kWarpgroup] = x[i];
  }
  /// The sums of this and the parts behind it, `parts` in all. Those of a part are loaded at once:
  /// loads take far longer than additions.
  __device__ void add_up(int first, float (&x)[kSums], int parts) const {
#pragma unroll
    for (int i = 0; i < kSums; ++i) x[i] = __ldcg(at + (first + i) * kWarpgroup);
    const float* from = at + first * kWarpgroup;
#pragma unroll 1
    for (int part = 1; part < parts; ++part) {
      from += kPart;
      float y[kSums];
#pragma unroll
      for (int i = 0; i < kSums; ++i) y[i] = __ldcg(from + i * kWarpgroup);
#pragma unroll
      for (int i = 0; i < kSums; ++i) x[i] += y[i];
    }
  }
};

/// Hands over the sums of a part. Returns whether all parts of the consumer are there: then dv and
/// dk have their sums, and it is this thread block that writes results. is_last: a word of shared
/// memory for each consumer.
template <int D>
__device__ bool add_parts(float (&dv)[D / 2], float (&dk)[D / 2], const BackwardParams& p,
                          const Walk& w, int consumer, uint32_t thread, int* is_last) {
  using Sums = PartSums<D>;
  const Sums mine(p.part_sums, w.first_part + w.part, consumer, thread);
  mine.put(0, dv), mine.put(Sums::kSums, dk);
  __threadfence();
  meet(meeting_of(consumer));
  if (thread == 0) {
    uint32_t* const done = p.parts_done + w.first_part * kConsumers + consumer;
    is_last[consumer] = atomicAdd(done, 1u) + 1 == static_cast<uint32_t>(w.parts);
  }
  meet(meeting_of(consumer));
  if (is_last[consumer] == 0) return false;
  __threadfence();
  const Sums all(p.part_sums, w.first_part, consumer, thread);
  all.add_up(0, dv, w.parts), all.add_up(Sums::kSums, dk, w.parts);
  return true;
}

}  // namespace sagebwd::cuda::sm90::bwd
