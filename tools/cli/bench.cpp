// SPDX-License-Identifier: Apache-2.0
// sagebwd bench: time of whole calls, multiply-adds per second, and the share of the machine's
// peak.
#include <CLI/CLI.hpp>
#include <cstdio>
#include <memory>
#include <nlohmann/json.hpp>

#include "bench_run.h"
#include "commands.h"
#include "memory.h"
#include "options.h"

namespace sagebwd::cli {
namespace {

/// Printed below the options by --help.
constexpr const char* kHelp = R"(What the columns mean:
  ms             median wall time of the whole call through the public API: quantisation, smoothing,
                 softmax and the floating-point dP are all inside. Inputs are random.
  GMAC/s         multiply-adds of all matmuls over that time. Only visible (query, key) pairs count,
                 with block lists (keep=) only those in listed blocks.
  INT8 GMAC/s    the same for INT8 multiply-adds only. dP is never one of them, nor is P·V of the
                 leading entries of block lists (lead=).
  share of peak  INT8 multiply-adds / (wall time × INT8 peak).
  INT8 part      the same, with floating-point multiply-adds taken out of the time at FMA peak:
                 INT8 multiply-adds / ((wall time − floating multiply-adds / FMA peak) × INT8 peak).
                 Too high where dP multiplies BF16, faster than FMA: cpu-avx512-bf16, BF16 tensors.

The peaks are measured before every timed run, with as many threads as the calls use, by loops that
touch registers only (AVX2: vpmaddubsw + vpmaddwd + vpaddd; AVX-512 VNNI: vpdpbusd; FP32: fused
multiply-add). Their medians are used. A call is compared with the peak of the instruction set that
its implementation uses.

Examples:
  sagebwd bench
  sagebwd bench "h8 n4096 d64 causal" "h8 n4096 d64 causal paper" --reps 21 --threads 1
  sagebwd bench "h4 n16384 d64" "h4 n16384 d64 keep=0.1" --reps 5
  sagebwd bench --impl cpu-avx2 --json bench.json)";

struct BenchOptions {
  std::vector<std::string> cases{"h8 n4096 d64 full", "h8 n4096 d64 causal", "h8 n4096 d128 full",
                                 "h8 n4096 d128 causal"};
  BenchSettings settings;
  std::string json_path;
  RunOptions run;
};

void run(const BenchOptions& o, const std::string& command_line) {
  o.run.apply();
  std::vector<spec::AttnCase> cases;
  for (const std::string& text : o.cases) {
    cases.push_back(spec::AttnCase::parse(text));
    check_memory(cases.back());
  }
  const Benchmark b = run_benchmark(cases, o.settings, o.run.talk());
  std::fputs((bench_table(b) + "\n" + bench_note(b)).c_str(), stdout);
  if (o.json_path.empty()) return;
  nlohmann::json record = record_head(command_line);
  record.update(bench_json(b));
  write_file(o.json_path, json_text(record));
}

}  // namespace

void add_bench(CLI::App& app, const std::string& command_line) {
  auto* command =
      app.add_subcommand("bench", "Time, multiply-adds per second, share of the machine's peak");
  auto o = std::make_shared<BenchOptions>();
  command
      ->add_option("case", o->cases,
                   "Case strings; default: h8 n4096 with d64 and d128, full and causal")
      ->type_name("CASE");
  command->add_option("--reps", o->settings.reps, "Timed runs per case; the median counts")
      ->capture_default_str()
      ->check(CLI::Range(1, 100000).description(""))
      ->type_name("N");
  command->add_option("--warmup", o->settings.warmup, "Runs before that")
      ->capture_default_str()
      ->check(CLI::Range(0, 1000).description(""))
      ->type_name("N");
  command->add_option("--json", o->json_path, "Write the figures to this file")->type_name("FILE");
  add_run_options(*command, o->run);
  command->footer(kHelp);
  command->callback([o, command_line] { run(*o, command_line); });
}

}  // namespace sagebwd::cli
