// SPDX-License-Identifier: Apache-2.0
#include "base/parallel.h"

#include <sched.h>

#include <algorithm>
#include <atomic>
#include <cstdlib>
#include <exception>
#include <mutex>
#include <thread>
#include <vector>

#include "base/check.h"

namespace sagebwd {
namespace {

/// Scratch memory grows with the number of threads, so SAGEBWD_THREADS needs a bound.
constexpr long kMostThreads = 1024;

/// An exception of the body must not unwind through the caller's thread pool. The first one is kept
/// until the loop is finished.
struct Guarded {
  void (*body)(void*, int64_t);
  void* user;
  int64_t count;
  std::atomic<int64_t> done{0};
  std::atomic<bool> failed{false};
  std::mutex mutex;
  std::exception_ptr error;

  void run(int64_t i) {
    if (failed.load(std::memory_order_relaxed)) return;
    try {
      SAGE_CHECK(i >= 0 && i < count,
                 "parallel_for: expected it to run items 0 to " << count - 1 << ", got " << i);
      body(user, i);
      ++done;
    } catch (...) {
      const std::lock_guard<std::mutex> lock(mutex);
      if (!error) error = std::current_exception();
      failed = true;
    }
  }
};

/// Threads that are started for one loop. Starting them takes some ten microseconds, which is
/// little next to a phase of attention, and leaves no state behind. If the system refuses a thread,
/// those that did start share the work; in the worst case the caller's thread does all of it.
void run_on_own_threads(Guarded& guarded) {
  const int threads = static_cast<int>(std::min<int64_t>(default_threads(), guarded.count));
  std::atomic<int64_t> next{0};
  const auto work = [&] {
    for (int64_t i = next++; i < guarded.count; i = next++) guarded.run(i);
  };
  std::vector<std::thread> helpers;
  try {
    helpers.reserve(static_cast<size_t>(threads));
    while (static_cast<int>(helpers.size()) + 1 < threads) helpers.emplace_back(work);
  } catch (const std::exception&) {  // no thread, or no memory for one
  }
  work();
  for (std::thread& t : helpers) t.join();
}

}  // namespace

int default_threads() {
  if (const char* env = std::getenv("SAGEBWD_THREADS")) {
    const long n = std::strtol(env, nullptr, 10);
    if (n > 0) return static_cast<int>(std::min(n, kMostThreads));
  }
  cpu_set_t set;
  if (sched_getaffinity(0, sizeof(set), &set) == 0) return CPU_COUNT(&set);
  const unsigned n = std::thread::hardware_concurrency();
  return n > 0 ? static_cast<int>(n) : 1;
}

namespace detail {

void run_parallel(const ParallelFor& pf, int64_t count, void (*body)(void*, int64_t), void* user) {
  if (count <= 0) return;
  Guarded guarded{body, user, count, {}, {}, {}, {}};
  if (pf.run != nullptr) {
    pf.run(
        pf.context, count, [](void* g, int64_t i) { static_cast<Guarded*>(g)->run(i); }, &guarded);
  } else {
    run_on_own_threads(guarded);
  }
  if (guarded.error) std::rethrow_exception(guarded.error);
  // A pool that skips items, or returns before they are done, would give wrong results silently.
  SAGE_CHECK(guarded.done == count, "parallel_for: expected it to run "
                                        << count << " items, each once, before it returns, got "
                                        << guarded.done);
}

}  // namespace detail
}  // namespace sagebwd
