// SPDX-License-Identifier: Apache-2.0
// A thread pool such as a caller may bring: any number of threads, any order of items.
#pragma once

#include <atomic>
#include <thread>
#include <utility>
#include <vector>

#include "sagebwd/types.h"
#include "support/random.h"

namespace sagebwd::testing {

/// A caller's pool of `threads` threads that hands out items in a shuffled order.
struct Pool {
  int threads;
  uint64_t seed = 1;

  ParallelFor parallel_for() { return {run, this}; }

 private:
  static void run(void* context, int64_t count, void (*body)(void*, int64_t), void* user) {
    Pool& pool = *static_cast<Pool*>(context);
    std::vector<int64_t> order(static_cast<size_t>(count));
    for (int64_t i = 0; i < count; ++i) order[i] = i;
    Random random(pool.seed++);
    for (int64_t i = count - 1; i > 0; --i) std::swap(order[i], order[random.integer(0, i)]);
    std::atomic<int64_t> next{0};
    const auto work = [&] {
      for (int64_t i = next++; i < count; i = next++) body(user, order[i]);
    };
    std::vector<std::thread> helpers;
    for (int t = 1; t < pool.threads; ++t) helpers.emplace_back(work);
    work();
    for (std::thread& t : helpers) t.join();
  }
};

}  // namespace sagebwd::testing
