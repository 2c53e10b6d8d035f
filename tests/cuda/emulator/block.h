// SPDX-License-Identifier: Apache-2.0
// A CUDA thread block on the CPU: every thread a fiber, all of them on one thread of the system.
//
// Warps go on in random order, each for a random while, so that code whose result depends on the
// order of warps gives a wrong one. A thread leaves its fiber only where the GPU too would make it
// wait: at a barrier, and where the lanes of a warp meet (shuffles, votes, matrix instructions).
//
// What cannot be seen here: how long anything takes, conflicts of banks, and races between the
// lanes of one warp that do not meet in between.
#pragma once

#include <array>
#include <cstdint>
#include <functional>
#include <memory>
#include <unordered_map>
#include <vector>

#include "emulator/fiber.h"
#include "emulator/vector_types.h"

namespace sagebwd::emulator {

inline constexpr int kLanes = 32;

/// Ends the program with a message that names the block and the thread: the kernel is wrong.
[[noreturn]] void fail(const char* what);

/// Something threads wait for: over when `round` has moved on.
struct Meeting {
  int arrived = 0;
  unsigned round = 0;
  void finish() { arrived = 0, ++round; }
};

struct Barrier : Meeting {
  std::array<bool, 2> any{};  // votes of this round and of the one before
};

struct Warp : Meeting {
  std::array<void*, kLanes> given{};
  void (*work)() = nullptr;  // what the lanes have met for
  unsigned meetings = 0;     // since the warp was last at a barrier
};

/// A copy into shared memory that is under way; without a source it writes zeros.
struct Copy {
  void* to;
  const void* from;
  size_t bytes;
  void make() const;
};

/// A bulk copy that is under way.
struct BulkCopy {
  int64_t bytes;
  std::function<void()> make;
};
/// A barrier in shared memory (emulator/bulk.h); a round is a phase.
struct BulkBarrier : Meeting {
  int number = 0;  // in the order in which the block made them
  int arrivals = 0, missing = 0;
  int64_t bytes = 0;  // announced, and not there yet
  int waiting = 0;    // threads
  std::vector<BulkCopy> copies;
};

struct Products;  // emulator/products.h
struct ForgetProducts {
  void operator()(Products* products) const;
};

struct Thread {
  explicit Thread(Fiber::Entry entry) : fiber(entry) {}

  Fiber fiber;
  uint3 index{};
  unsigned lane = 0;
  Warp* warp = nullptr;
  bool done = true;
  const Meeting* waits_for = nullptr;
  unsigned round = 0;  // of it
  // Groups of copies, oldest first; the last one is still open.
  std::vector<std::vector<Copy>> copies;
  std::unique_ptr<Products, ForgetProducts> products;  // of a warpgroup, that are under way
  unsigned pauses = 0;                                 // since it last met anybody

  bool can_go_on() const { return !done && (waits_for == nullptr || waits_for->round != round); }
};

class Block {
 public:
  Block(dim3 grid, int threads, int shared_bytes);

  /// Runs the kernel, a function of an opaque pointer, for every thread of a block.
  void run(uint3 index, void (*kernel)(const void*), const void* params);

  uint3 index{};
  const dim3 grid, size;
  std::unordered_map<uint32_t, BulkBarrier> bulk_barriers;  // by address

  /// Waits for `threads` threads, 0: for all that have not ended. Returns whether any voted yes.
  bool barrier(int id, int threads, bool vote = false);
  void wait(const Meeting& meeting);
  /// Lets other threads go first.
  void pause();

 private:
  static void entry();
  void start_threads();
  void run_for_a_while(size_t warp);
  void end_thread();
  unsigned random(unsigned below);

  int shared_bytes_;
  void (*kernel_)(const void*) = nullptr;
  const void* params_ = nullptr;
  std::vector<std::unique_ptr<Thread>> threads_;
  std::vector<Warp> warps_;
  std::array<Barrier, 16> barriers_;
  int alive_ = 0;
  uint64_t random_ = 0;
};

/// The block and the thread that run on this thread of the system.
extern constinit thread_local Block* block;
extern constinit thread_local Thread* thread;

/// What each lane of a warp brought to a meeting.
template <typename Given>
struct Lanes {
  const std::array<void*, kLanes>& given;
  Given& operator[](unsigned lane) const { return *static_cast<Given*>(given[lane]); }
};

/// All lanes of a warp meet; the last one does the work for all.
template <typename Given>
void meet(Given& mine, void (*work)(Lanes<Given>)) {
  Warp& w = *thread->warp;
  const auto what = reinterpret_cast<void (*)()>(work);
  if (w.arrived > 0 && w.work != what) fail("lanes of a warp are at different instructions");
  w.work = what;
  w.given[thread->lane] = &mine;
  if (++w.arrived < kLanes) {
    block->wait(w);
  } else {
    constexpr unsigned kTooMany = 300000;
    if (++w.meetings > kTooMany) fail("a loop that never ends");
    work({w.given});
    w.finish();
  }
}

// Shared memory of a launch that asks for some (`extern __shared__`).
void* shared_pointer(uint32_t address, uint32_t alignment);
uint32_t shared_address(const void* pointer);

// cp.async
void start_copy(uint32_t to, const void* from, uint32_t bytes, bool real);
void close_copies();
void wait_for_copies(size_t pending);

/// Remembers which kernels ran (SAGEBWD_EMULATOR_LAUNCHES).
void note_launch(void (*kernel)());

/// Runs all blocks of a grid, several at the same time.
void run_grid(dim3 grid, int threads, int shared_bytes, void (*kernel)(const void*),
              const void* params);

}  // namespace sagebwd::emulator
