// SPDX-License-Identifier: Apache-2.0
#include "base/parallel.h"

#include <sched.h>

#include <atomic>
#include <cstdlib>
#include <exception>
#include <mutex>
#include <thread>
#include <vector>

namespace sagebwd {
namespace {

/// A body that throws must not unwind through the caller's thread pool: keep the first exception,
/// finish the loop.
struct Guarded {
  void (*body)(void*, int64_t);
  void* user;
  std::atomic<bool> failed{false};
  std::mutex mutex;
  std::exception_ptr error;

  void run(int64_t i) {
    if (failed.load(std::memory_order_relaxed)) return;
    try {
      body(user, i);
    } catch (...) {
      const std::lock_guard<std::mutex> lock(mutex);
      if (!error) error = std::current_exception();
      failed = true;
    }
  }
};

/// Threads started for one loop. Starting them costs some ten microseconds, little next to an
/// attention phase, and leaves no state behind.
void run_on_own_threads(int64_t count, Guarded& guarded) {
  const int threads = static_cast<int>(std::min<int64_t>(default_threads(), count));
  std::atomic<int64_t> next{0};
  const auto work = [&] {
    for (int64_t i = next++; i < count; i = next++) guarded.run(i);
  };
  std::vector<std::thread> helpers;
  for (int t = 1; t < threads; ++t) helpers.emplace_back(work);
  work();
  for (std::thread& t : helpers) t.join();
}

}  // namespace

int default_threads() {
  if (const char* env = std::getenv("SAGEBWD_THREADS")) {
    const long n = std::strtol(env, nullptr, 10);
    if (n > 0) return static_cast<int>(n);
  }
  cpu_set_t set;
  if (sched_getaffinity(0, sizeof(set), &set) == 0) return CPU_COUNT(&set);
  const unsigned n = std::thread::hardware_concurrency();
  return n > 0 ? static_cast<int>(n) : 1;
}

namespace detail {

void run_parallel(const ParallelFor& pf, int64_t count, void (*body)(void*, int64_t), void* user) {
  if (count <= 0) return;
  Guarded guarded{body, user, {}, {}, {}};
  if (pf.run != nullptr) {
    pf.run(
        pf.context, count, [](void* g, int64_t i) { static_cast<Guarded*>(g)->run(i); }, &guarded);
  } else {
    run_on_own_threads(count, guarded);
  }
  if (guarded.error) std::rethrow_exception(guarded.error);
}

}  // namespace detail
}  // namespace sagebwd
