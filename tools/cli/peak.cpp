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

std::vector<Peak> measure_peaks(int threads, double seconds) {
  std::vector<Peak> peaks;
  for (const PeakLoops& l : peak_loops())
    if (l.available())
      peaks.push_back({l.isa, l.instructions,
                       best_rate(threads, seconds / 2, l.int8_macs_per_round, l.int8),
                       best_rate(threads, seconds / 2, l.fp32_macs_per_round, l.fp32)});
  return peaks;
}

const Peak* peak_for(const std::vector<Peak>& peaks, const std::string& implementation) {
  const Peak* best = nullptr;
  for (const Peak& p : peaks) {
    if (implementation == "cpu-" + p.isa) return &p;
    if (best == nullptr || p.int8 > best->int8) best = &p;
  }
  return best;
}

}  // namespace sagebwd::cli
