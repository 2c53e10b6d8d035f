// SPDX-License-Identifier: Apache-2.0
#include "base/parallel.h"

#include <gtest/gtest.h>
#include <pthread.h>
#include <sys/resource.h>

#include <atomic>
#include <chrono>
#include <cstdlib>
#include <fstream>
#include <mutex>
#include <set>
#include <stdexcept>
#include <string>
#include <system_error>
#include <thread>
#include <vector>

#include "sagebwd/error.h"

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
  for (const char* absurd : {"2147483647", "4294967297", "99999999999999999999"}) {
    const WithThreads scope(absurd);
    EXPECT_EQ(default_threads(), 1024) << absurd;
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

/// New threads get stacks of this size while it lives: a stack that does not fit into the address
/// space is a thread that the system refuses.
class WithStacks {
 public:
  explicit WithStacks(size_t bytes) {
    pthread_getattr_default_np(&old_);
    pthread_attr_t attr;
    pthread_getattr_default_np(&attr);
    EXPECT_EQ(pthread_attr_setstacksize(&attr, bytes), 0);
    EXPECT_EQ(pthread_setattr_default_np(&attr), 0);
    pthread_attr_destroy(&attr);
  }
  ~WithStacks() {
    pthread_setattr_default_np(&old_);
    pthread_attr_destroy(&old_);
  }

 private:
  pthread_attr_t old_;
};

/// Room for `bytes` more of address space while it lives.
class WithAddressSpace {
 public:
  explicit WithAddressSpace(size_t bytes) {
    getrlimit(RLIMIT_AS, &old_);
    size_t pages = 0;
    std::ifstream("/proc/self/statm") >> pages;
    rlimit limit = old_;
    limit.rlim_cur = pages * 4096 + bytes;
    EXPECT_EQ(setrlimit(RLIMIT_AS, &limit), 0);
  }
  ~WithAddressSpace() { setrlimit(RLIMIT_AS, &old_); }

 private:
  rlimit old_;
};

/// Threads that took part in a loop whose items wait a while for company.
size_t threads_of_a_loop() {
  std::mutex mutex;
  std::set<std::thread::id> seen;
  std::vector<int> runs(100, 0);
  parallel_for({}, 100, [&](int64_t i) {
    ++runs[static_cast<size_t>(i)];
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
    const std::lock_guard<std::mutex> lock(mutex);
    seen.insert(std::this_thread::get_id());
  });
  for (int r : runs) EXPECT_EQ(r, 1);
  return seen.size();
}

TEST(Parallel, RunsOnTheCallersThreadWhereNoOtherStarts) {
  const WithThreads scope("8");
  const WithStacks scope2(size_t{1} << 47);
  EXPECT_THROW(std::thread([] {}).join(), std::system_error);
  EXPECT_EQ(threads_of_a_loop(), 1u);
}

TEST(Parallel, RunsOnTheThreadsThatStart) {
  const WithThreads scope("8");
  const WithStacks scope2(size_t{1} << 30);
  const WithAddressSpace scope3(size_t{7} << 29);  // 3.5 stacks
  EXPECT_EQ(threads_of_a_loop(), 4u);
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

/// If a pool left out items, their results would silently be missing.
TEST(Parallel, PoolThatDoesNotDoItsWorkIsAnError) {
  using Pooled = void (*)(void*, int64_t, void (*)(void*, int64_t), void*);
  const Pooled forgets = [](void*, int64_t count, void (*body)(void*, int64_t), void* user) {
    for (int64_t i = 0; i + 1 < count; ++i) body(user, i);
  };
  const Pooled repeats = [](void*, int64_t count, void (*body)(void*, int64_t), void* user) {
    for (int64_t i = 0; i < count; ++i) body(user, i);
    body(user, 0);
  };
  const Pooled overruns = [](void*, int64_t count, void (*body)(void*, int64_t), void* user) {
    for (int64_t i = 0; i <= count; ++i) body(user, i);
  };
  const Pooled nothing = [](void*, int64_t, void (*)(void*, int64_t), void*) {};
  for (const Pooled run : {forgets, repeats, overruns, nothing}) {
    try {
      parallel_for({run, nullptr}, 5, [](int64_t i) { EXPECT_LT(i, 5); });
      ADD_FAILURE() << "accepted";
    } catch (const Error& e) {
      EXPECT_EQ(e.kind(), ErrorKind::invalid_argument);
      EXPECT_NE(std::string(e.what()).find("parallel_for: expected"), std::string::npos);
    }
  }
}

/// What the caller's pool throws is the caller's to catch.
TEST(Parallel, ExceptionOfThePoolItselfComesBack) {
  const ParallelFor throws{
      [](void*, int64_t, void (*)(void*, int64_t), void*) { throw std::runtime_error("no pool"); },
      nullptr};
  EXPECT_THROW(parallel_for(throws, 3, [](int64_t) {}), std::runtime_error);
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
