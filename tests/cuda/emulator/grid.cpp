// SPDX-License-Identifier: Apache-2.0
// The blocks of a grid, in order, a few of them at the same time: each on a thread of the system,
// because that is what has memory of its own to be shared memory.
#include <condition_variable>
#include <mutex>
#include <thread>

#include "emulator/block.h"
#include "emulator/turns.h"

namespace sagebwd::emulator {
namespace {

constexpr int kAtATime = 3;

/// One of several threads runs, the others wait for their turn.
class Turns {
 public:
  explicit Turns(int threads) : there_(static_cast<size_t>(threads), true) {}

  void wait(int me) {
    std::unique_lock lock(mutex_);
    changed_.wait(lock, [&] { return now_ == me; });
  }
  void pass(int me) {
    next(me);
    wait(me);
  }
  void leave(int me) {
    there_[static_cast<size_t>(me)] = false;
    next(me);
  }

 private:
  void next(int me) {
    const std::lock_guard lock(mutex_);
    const int count = static_cast<int>(there_.size());
    for (int i = 1; i <= count; ++i)
      if (const int other = (me + i) % count; there_[static_cast<size_t>(other)]) {
        now_ = other;
        break;
      }
    changed_.notify_all();
  }

  std::mutex mutex_;
  std::condition_variable changed_;
  std::vector<bool> there_;  // touched only by the thread whose turn it is
  int now_ = 0;
};

constinit thread_local Turns* turns = nullptr;
constinit thread_local int my_number = 0;

}  // namespace

void let_other_blocks_go() { turns->pass(my_number); }

void run_grid(dim3 grid, int threads, int shared_bytes, void (*kernel)(const void*),
              const void* params) {
  const uint64_t count = uint64_t{grid.x} * grid.y * grid.z;
  if (count == 0) return;
  const int at_a_time = static_cast<int>(std::min<uint64_t>(kAtATime, count));
  Turns all(at_a_time);
  uint64_t next = 0;
  const auto work = [&](int number) {
    turns = &all, my_number = number;
    all.wait(number);
    Block b(grid, threads, shared_bytes);
    while (next < count) {
      const uint64_t i = next++;
      b.run({static_cast<unsigned>(i % grid.x), static_cast<unsigned>(i / grid.x % grid.y),
             static_cast<unsigned>(i / grid.x / grid.y)},
            kernel, params);
    }
    all.leave(number);
  };
  std::vector<std::jthread> others;
  for (int i = 1; i < at_a_time; ++i) others.emplace_back(work, i);
  work(0);
}

}  // namespace sagebwd::emulator
