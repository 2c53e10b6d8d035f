// SPDX-License-Identifier: Apache-2.0
// The blocks of a grid, in order, on a few threads of the system: blocks that wait for one another
// or add to the same numbers then really meet.
#include <atomic>
#include <thread>

#include "emulator/block.h"

namespace sagebwd::emulator {
namespace {

constexpr int kAtATime = 2;

}  // namespace

void run_grid(dim3 grid, int threads, int shared_bytes, void (*kernel)(const void*),
              const void* params) {
  const uint64_t count = uint64_t{grid.x} * grid.y * grid.z;
  std::atomic<uint64_t> next = 0;
  const auto work = [&] {
    Block b(grid, threads, shared_bytes);
    for (uint64_t i; (i = next++) < count;)
      b.run({static_cast<unsigned>(i % grid.x), static_cast<unsigned>(i / grid.x % grid.y),
             static_cast<unsigned>(i / grid.x / grid.y)},
            kernel, params);
  };
  std::vector<std::jthread> others;
  for (int i = 1; i < kAtATime && static_cast<uint64_t>(i) < count; ++i) others.emplace_back(work);
  work();
}

}  // namespace sagebwd::emulator
