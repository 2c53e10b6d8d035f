// SPDX-License-Identifier: Apache-2.0
#include "base/parallel.h"

#include <gtest/gtest.h>

#include <atomic>
#include <cstdlib>
#include <mutex>
#include <set>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

namespace sagebwd {
namespace {

/// SAGEBWD_THREADS for one test.
class WithThreads {
 public:
  explicit WithThreads(const char* value) {
    if (const char* old = std::getenv("SAGEBWD_THREADS")) old_ = old, had_ = true;
    setenv("SAGEBWD_THREADS", value, 1);
  }
  ~WithThreads() {
    if (had_)
      setenv("SAGEBWD_THREADS", old_.c_str(), 1);
    else
      unsetenv("SAGEBWD_THREADS");
  }

 private:
  std::string old_;
  bool had_ = false;
};

TEST(Parallel, EachItemRunsOnce) {
  for (const char* threads : {"1", "2", "7"}) {
    const WithThreads scope(threads);
    for (const int64_t count : {0, 1, 2, 3, 8, 1000}) {
      std::vector<std::atomic<int>> runs(static_cast<size_t>(count) + 1);
      parallel_for({}, count, [&](int64_t i) { ++runs[static_cast<size_t>(i)]; });
      for (int64_t i = 0; i < count; ++i)
        EXPECT_EQ(runs[static_cast<size_t>(i)], 1) << i << " of " << count;
      EXPECT_EQ(runs[static_cast<size_t>(count)], 0);
    }
  }
}

TEST(Parallel, WritesAreVisibleAfterTheLoop) {
  const WithThreads scope("4");
  std::vector<int64_t> squares(5000, -1);  // plain memory: a missing join would be a data race
  parallel_for({}, 5000, [&](int64_t i) { squares[static_cast<size_t>(i)] = i * i; });
  for (int64_t i = 0; i < 5000; ++i) ASSERT_EQ(squares[static_cast<size_t>(i)], i * i);
}

TEST(Parallel, ThreadCountComesFromTheEnvironment) {
  {
    const WithThreads scope("5");
    EXPECT_EQ(default_threads(), 5);
  }
  for (const char* nonsense : {"0", "-3", "many", ""}) {
    const WithThreads scope(nonsense);
    EXPECT_GE(default_threads(), 1) << nonsense;
    EXPECT_LE(default_threads(), static_cast<int>(std::thread::hardware_concurrency())) << nonsense;
  }
}

TEST(Parallel, OneThreadStaysOnTheCallers) {
  const WithThreads scope("1");
  const std::thread::id caller = std::this_thread::get_id();
  parallel_for({}, 50, [&](int64_t) { EXPECT_EQ(std::this_thread::get_id(), caller); });
}

TEST(Parallel, NeverMoreThreadsThanAsked) {
  const WithThreads scope("3");
  std::mutex mutex;
  std::set<std::thread::id> seen;
  parallel_for({}, 2000, [&](int64_t) {
    const std::lock_guard<std::mutex> lock(mutex);
    seen.insert(std::this_thread::get_id());
  });
  EXPECT_LE(seen.size(), 3u);
}

TEST(Parallel, FirstExceptionComesBackAfterTheLoop) {
  const WithThreads scope("4");
  std::atomic<int> running{0};
  try {
    parallel_for({}, 400, [&](int64_t i) {
      ++running;
      if (i == 17) {
        --running;
        throw std::runtime_error("item 17");
      }
      --running;
    });
    ADD_FAILURE() << "the exception was lost";
  } catch (const std::runtime_error& e) {
    EXPECT_STREQ(e.what(), "item 17");
  }
  EXPECT_EQ(running, 0) << "the loop returned while a body was running";
}

/// The caller's pool: here two threads of its own, and a context that must come back unchanged.
struct Pool {
  std::atomic<int64_t> calls{0};
  static void run(void* context, int64_t count, void (*body)(void*, int64_t), void* user) {
    ++static_cast<Pool*>(context)->calls;
    std::thread odd([&] {
      for (int64_t i = 1; i < count; i += 2) body(user, i);
    });
    for (int64_t i = 0; i < count; i += 2) body(user, i);
    odd.join();
  }
};

TEST(Parallel, CallersPoolIsUsed) {
  Pool pool;
  std::vector<int> runs(101, 0);
  parallel_for({&Pool::run, &pool}, 101, [&](int64_t i) { ++runs[static_cast<size_t>(i)]; });
  EXPECT_EQ(pool.calls, 1);
  for (int r : runs) EXPECT_EQ(r, 1);
  parallel_for({&Pool::run, &pool}, 0, [](int64_t) { ADD_FAILURE() << "nothing to run"; });
  EXPECT_EQ(pool.calls, 1) << "an empty loop needs no pool";
}

/// An exception must not unwind through a pool that may be written in C.
TEST(Parallel, ExceptionDoesNotPassThroughTheCallersPool) {
  struct Strict {
    static void run(void* context, int64_t count, void (*body)(void*, int64_t), void* user) {
      for (int64_t i = 0; i < count; ++i) {
        try {
          body(user, i);
        } catch (...) {
          *static_cast<bool*>(context) = true;
        }
      }
    }
  };
  bool unwound = false;
  EXPECT_THROW(parallel_for({&Strict::run, &unwound}, 10,
                            [](int64_t i) {
                              if (i == 3) throw std::invalid_argument("three");
                            }),
               std::invalid_argument);
  EXPECT_FALSE(unwound);
}

TEST(Parallel, LoopsNest) {
  const WithThreads scope("3");
  std::atomic<int64_t> sum{0};
  parallel_for({}, 6,
               [&](int64_t i) { parallel_for({}, 5, [&](int64_t j) { sum += i * 10 + j; }); });
  EXPECT_EQ(sum, 5 * 10 * (0 + 1 + 2 + 3 + 4 + 5) + 6 * (0 + 1 + 2 + 3 + 4));
}

}  // namespace
}  // namespace sagebwd
