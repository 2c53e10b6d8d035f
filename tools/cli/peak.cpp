// SPDX-License-Identifier: Apache-2.0
#include "peak.h"

#include <algorithm>
#include <atomic>
#include <chrono>
#include <thread>

namespace sagebwd::cli {
namespace {

using Clock = std::chrono::steady_clock;

double seconds_since(Clock::time_point start) {
  return std::chrono::duration<double>(Clock::now() - start).count();
}

volatile float sink;  // keeps the loops' results alive

/// Seconds that `threads` threads need for `rounds` rounds each, started together.
template <typename Loop>
double timed(int threads, int64_t rounds, Loop loop) {
  std::atomic<int> waiting{threads};
  const auto work = [&] {
    for (--waiting; waiting > 0;) std::this_thread::yield();
    sink = static_cast<float>(loop(rounds));
  };
  std::vector<std::thread> helpers;
  for (int t = 1; t < threads; ++t) helpers.emplace_back(work);
  --waiting;
  while (waiting > 0) std::this_thread::yield();
  const auto start = Clock::now();
  sink = static_cast<float>(loop(rounds));
  for (std::thread& t : helpers) t.join();
  return seconds_since(start);
}

/// Best rate of a loop: other work on the machine can only make it slower.
template <typename Loop>
double best_rate(int threads, double seconds, int64_t macs_per_round, Loop loop) {
  int64_t rounds = 1 << 16;
  while (timed(1, rounds, loop) < 0.01) rounds *= 2;
  double best = 0;
  const auto start = Clock::now();
  do {
    const double rate = static_cast<double>(threads) *
                        static_cast<double>(rounds * macs_per_round) / timed(threads, rounds, loop);
    best = std::max(best, rate);
  } while (seconds_since(start) < seconds);
  return best;
}

}  // namespace

const std::vector<PeakLoops>& peak_loops() {
  static const std::vector<PeakLoops> loops {
#if defined(SAGEBWD_CLI_X86)
    kAvx512VnniLoops, kAvx2Loops,
#endif
  };
  return loops;
}

Peak measure_peak(const PeakLoops& l, int threads, double seconds) {
  return {l.isa, l.instructions, best_rate(threads, seconds / 2, l.int8_macs_per_round, l.int8),
          best_rate(threads, seconds / 2, l.fp32_macs_per_round, l.fp32)};
}

const PeakLoops* loops_for(const std::vector<PeakLoops>& loops, const std::string& implementation) {
  const PeakLoops* first = nullptr;
  for (const PeakLoops& l : loops) {
    if (!l.available()) continue;
    if (implementation == std::string("cpu-") + l.isa) return &l;
    if (first == nullptr) first = &l;
  }
  return first;
}

}  // namespace sagebwd::cli
