// SPDX-License-Identifier: Apache-2.0
#include "emulator/bulk.h"

#include <cstring>
#include <functional>

#include "emulator/block.h"
#include "emulator/faults.h"
#include "emulator/options.h"

namespace sagebwd::emulator {
namespace {

BulkBarrier& barrier_at(uint32_t address) {
  shared_pointer(address, 8);
  const auto found = block->bulk_barriers.find(address);
  if (found == block->bulk_barriers.end()) fail("a barrier that was not initialised");
  return found->second;
}

/// Ends the phase if nothing is missing but copies that may happen now.
void try_to_end(BulkBarrier& b) {
  if (b.missing > 0 || (!b.copies.empty() && b.waiting == 0)) return;
  int64_t coming = 0;
  for (const BulkCopy& copy : b.copies) coming += copy.bytes;
  if (b.bytes != coming) return;
  for (const BulkCopy& copy : b.copies) copy.make();
  b.copies.clear();
  b.bytes = 0, b.missing = b.arrivals;
  b.finish();
}

void start(uint32_t barrier, uint32_t bytes, std::function<void()> make) {
  BulkBarrier& b = barrier_at(barrier);
  if (options().late_copies) {
    b.copies.push_back({bytes, std::move(make)});
  } else {
    make();
    b.bytes -= bytes;
  }
  try_to_end(b);
}

uint32_t swizzled(uint32_t address, CUtensorMapSwizzle kind) {
  if (has_fault(Fault::swizzle)) return address;
  return address ^ (address >> 7 & (kind == CU_TENSOR_MAP_SWIZZLE_128B ? 7 : 3)) << 4;
}

uint32_t placed(uint32_t to) { return has_fault(Fault::copy_place) ? to + 128 : to; }

void make_box(uint32_t to, const CUtensorMap& map, const int (&first)[5]) {
  constexpr int kChunk = 16;  // bytes that stay together
  const int row = map.box[0] * map.element,
            count[4] = {map.box[1], map.box[2], map.box[3], map.box[4]};
  for (int e = 0; e < count[3]; ++e)
    for (int d = 0; d < count[2]; ++d)
      for (int c = 0; c < count[1]; ++c)
        for (int b = 0; b < count[0]; ++b) {
          const int64_t at[5] = {first[0], first[1] + b, first[2] + c, first[3] + d, first[4] + e};
          const uint8_t* from = map.data;
          bool inside = true;
          for (int i = 1; i < 5; ++i) {
            inside = inside && at[i] >= 0 && at[i] < map.size[i];
            from += at[i] * map.stride[i];
          }
          for (int byte = 0; byte < row; byte += kChunk, to += kChunk) {
            auto* here = static_cast<uint8_t*>(shared_pointer(swizzled(to, map.swizzle), kChunk));
            for (int i = 0; i < kChunk; i += map.element) {
              const int64_t x = at[0] + (byte + i) / map.element;
              if (inside && x >= 0 && x < map.size[0])
                std::memcpy(here + i, from + x * map.element, static_cast<size_t>(map.element));
              else
                std::memset(here + i, 0, static_cast<size_t>(map.element));
            }
          }
        }
}

}  // namespace

void init_barrier(uint32_t barrier, int arrivals) {
  shared_pointer(barrier, 8);
  const int number = static_cast<int>(block->bulk_barriers.size());
  const auto [at, fresh] = block->bulk_barriers.try_emplace(barrier);
  if (!fresh) fail("a barrier is initialised twice");
  if (has_fault(Fault::arrivals, number)) --arrivals;
  at->second.number = number, at->second.arrivals = at->second.missing = arrivals;
}

void arrive_at_barrier(uint32_t barrier, uint32_t bytes) {
  BulkBarrier& b = barrier_at(barrier);
  if (has_fault(Fault::arrive, b.number)) return;
  if (bytes > 0 && has_fault(Fault::bytes, b.number)) bytes += 16;
  if (b.missing == 0) fail("more arrivals at a barrier than it takes");
  --b.missing, b.bytes += bytes;
  try_to_end(b);
}

void wait_for_barrier(uint32_t barrier, uint32_t parity) {
  BulkBarrier& b = barrier_at(barrier);
  thread->warp->meetings = 0;
  if (has_fault(Fault::wait, b.number)) return;
  if (has_fault(Fault::parity, b.number)) parity ^= 1;
  while (b.round % 2 == parity) {
    ++b.waiting;
    const unsigned round = b.round;
    try_to_end(b);
    if (b.round == round) block->wait(b);
    --b.waiting;
  }
}

void copy_bytes(uint32_t to, const void* from, uint32_t bytes, uint32_t barrier) {
  if (reinterpret_cast<uintptr_t>(from) % 16 != 0 || bytes % 16 != 0 || bytes == 0)
    fail("a misaligned bulk copy");
  void* here = shared_pointer(placed(to), 16);
  start(barrier, bytes, [=] { std::memcpy(here, from, bytes); });
}

void copy_box(uint32_t to, const CUtensorMap& map, const int (&first)[5], uint32_t barrier) {
  shared_pointer(to, 128);
  CUtensorMap whole = map;
  int64_t bytes = map.element;
  for (int i = 0; i < 5; ++i) {
    if (i >= map.dimensions) whole.size[i] = whole.box[i] = 1;
    bytes *= whole.box[i];
  }
  const int a = first[0], b = first[1], c = first[2], d = first[3], e = first[4];
  start(barrier, static_cast<uint32_t>(bytes), [=] {
    make_box(placed(to), whole, {a, b, c, d, e});
  });
}

}  // namespace sagebwd::emulator
