// SPDX-License-Identifier: Apache-2.0
// Timing of whole calls, and what the times mean in multiply-adds and shares of the machine's peak.
#pragma once

#include <nlohmann/json_fwd.hpp>
#include <optional>
#include <string>
#include <vector>

#include "peak.h"
#include "progress.h"
#include "spec/attn_case.h"

namespace sagebwd::cli {

/// One kind of call: its times and what it computes.
struct Pass {
  const char* name;  // forward, backward, both
  std::vector<double> seconds;
  int64_t int8_macs = 0, floating_macs = 0;

  double median() const;
  double fastest() const;
  double slowest() const;
  double macs_per_second() const;
  double int8_per_second() const;
  /// INT8 multiply-adds over what the peak could do in the whole time of the call.
  double share(const Peak& p) const;
  /// The same over the time left when floating-point multiply-adds are charged at FMA peak.
  double share_of_int8_part(const Peak& p) const;
};

struct Measured {
  spec::AttnCase c;
  std::string implementation;
  int tile_q = 0, tile_k = 0;
  std::vector<Pass> passes;  // forward, backward, both
  /// The machine's peak as it was between the timed runs: medians, like the times.
  std::optional<Peak> peak;
};

/// The machine and what ran on it.
struct Benchmark {
  int threads = 0, reps = 0;
  std::vector<Measured> cases;
};

struct BenchSettings {
  int reps = 7, warmup = 1;
  double peak_seconds = 0.04;  // before each timed run
};

Benchmark run_benchmark(const std::vector<spec::AttnCase>& cases, const BenchSettings& settings,
                        Talk talk);

/// A sentence that says what the shares in the table refer to.
std::string bench_note(const Benchmark& b);
std::string bench_table(const Benchmark& b);
/// {"reps", "results": [{"case", "impl", "tile", "peak": {…}, "forward": {…}, …}]}
nlohmann::json bench_json(const Benchmark& b);

}  // namespace sagebwd::cli
