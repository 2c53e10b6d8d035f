// SPDX-License-Identifier: Apache-2.0
#include "emulator/block.h"

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>

#include "emulator/options.h"
#include "emulator/products.h"
#include "emulator/shared_memory.h"
#include "emulator/target.h"
#include "emulator/turns.h"

namespace sagebwd::emulator {

constinit thread_local Block* block = nullptr;
constinit thread_local Thread* thread = nullptr;

void fail(const char* what) {
  std::fprintf(stderr, "emulated kernel: %s", what);
  if (block != nullptr)
    std::fprintf(stderr, "; block %u, %u, %u", block->index.x, block->index.y, block->index.z);
  if (thread != nullptr) std::fprintf(stderr, ", thread %u", thread->index.x);
  std::fprintf(stderr, "\n");
  std::abort();
}

Block::Block(dim3 g, int threads, int shared_bytes)
    : grid(g),
      size(static_cast<unsigned>(threads)),
      shared_bytes_(shared_bytes),
      warps_(static_cast<size_t>(threads / kLanes)) {
  if (threads % kLanes != 0 || threads > 1024) fail("a thread block of odd size");
  if (shared_bytes > shared_memory_of_block()) fail("more shared memory than there is");
  for (int i = 0; i < threads; ++i) {
    auto& t = *threads_.emplace_back(std::make_unique<Thread>(entry));
    t.index = {static_cast<unsigned>(i), 0, 0};
    t.lane = static_cast<unsigned>(i % kLanes);
    t.warp = &warps_[static_cast<size_t>(i / kLanes)];
  }
}

void Block::entry() {
  thread->fiber.begin();
  while (true) {
    block->kernel_(block->params_);
    block->end_thread();
  }
}

void Block::run(uint3 at, void (*kernel)(const void*), const void* params) {
  index = at, kernel_ = kernel, params_ = params;
  random_ = options().seed * 0x9e3779b97f4a7c15u + (at.z * grid.y + at.y) * grid.x + at.x;
  fill_shared_memory(shared_bytes_);
  start_threads();
  block = this;
  while (alive_ > 0) {
    const auto can_go_on = [](const auto& t) { return t->can_go_on(); };
    const size_t first = random(static_cast<unsigned>(warps_.size()));
    size_t warp = first;
    const auto lanes = [&](size_t w) {
      return threads_.begin() + static_cast<int64_t>(w) * kLanes;
    };
    while (std::none_of(lanes(warp), lanes(warp) + kLanes, can_go_on)) {
      warp = (warp + 1) % warps_.size();
      if (warp == first) fail("every thread waits for another one");
    }
    run_for_a_while(warp);
    if (random(8) == 0) let_other_blocks_go();
  }
  block = nullptr;
  check_shared_memory(shared_bytes_);
}

void Block::start_threads() {
  for (auto& t : threads_) {
    t->done = false, t->waits_for = nullptr;
    t->copies.assign(1, {});
    t->pauses = 0;
  }
  std::fill(warps_.begin(), warps_.end(), Warp{});
  barriers_.fill({});
  bulk_barriers.clear();
  alive_ = static_cast<int>(threads_.size());
}

void Block::run_for_a_while(size_t warp) {
  const unsigned turns = 1 + random(64);
  for (unsigned turn = 0; turn < turns; ++turn) {
    bool any = false;
    const unsigned first = random(kLanes);
    for (unsigned i = 0; i < kLanes; ++i) {
      Thread& t = *threads_[warp * kLanes + (first + i) % kLanes];
      if (!t.can_go_on()) continue;
      any = true;
      thread = &t;
      t.fiber.enter();
      thread = nullptr;
    }
    if (!any) return;
  }
}

void Block::end_thread() {
  check_no_products();
  thread->done = true;
  --alive_;
  // Those at the barrier of the whole block have waited for this thread too.
  if (Barrier& all = barriers_[0]; all.arrived > 0 && all.arrived >= alive_) all.finish();
  thread->fiber.leave();
}

bool Block::barrier(int id, int threads, bool vote) {
  Barrier& b = barriers_[static_cast<size_t>(id)];
  thread->warp->meetings = 0;
  const unsigned round = b.round;
  bool& any = b.any[round % 2];
  any |= vote;
  if (++b.arrived < (threads > 0 ? threads : alive_)) {
    wait(b);
  } else {
    b.any[(round + 1) % 2] = false;
    b.finish();
  }
  return any;
}

void Block::wait(const Meeting& meeting) {
  thread->waits_for = &meeting, thread->round = meeting.round;
  thread->fiber.leave();
}

void Block::pause() {
  constexpr unsigned kTooMany = 2000000;
  if (++thread->pauses > kTooMany) fail("a thread waits for something that never happens");
  thread->waits_for = nullptr;
  thread->fiber.leave();
}

unsigned Block::random(unsigned below) {
  random_ = random_ * 6364136223846793005u + 1442695040888963407u;
  return static_cast<unsigned>(random_ >> 33) % below;
}

}  // namespace sagebwd::emulator
