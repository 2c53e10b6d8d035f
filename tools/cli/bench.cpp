// SPDX-License-Identifier: Apache-2.0
// sagebwd bench: time of whole calls, multiply-adds per second, and the share of the machine's
// peak.
#include <CLI/CLI.hpp>
#include <algorithm>
#include <chrono>
#include <cstdio>
#include <memory>
#include <nlohmann/json.hpp>

#include "attention_run.h"
#include "base/parallel.h"
#include "commands.h"
#include "machine.h"
#include "options.h"
#include "peak.h"
#include "table.h"

namespace sagebwd::cli {
namespace {

using nlohmann::json;
using spec::AttnCase;
using spec::Direction;

struct BenchOptions {
  std::vector<std::string> cases{"h8 n4096 d64 full", "h8 n4096 d64 causal", "h8 n4096 d128 full",
                                 "h8 n4096 d128 causal"};
  int reps = 7;
  int warmup = 1;
  double peak_seconds = 0.3;
  std::string json_path;
  RunOptions run;
};

/// One kind of call: its times and what it computes.
struct Pass {
  const char* name;
  std::vector<double> seconds;
  int64_t int8_macs = 0, floating_macs = 0;

  double median() const {
    std::vector<double> s = seconds;
    std::sort(s.begin(), s.end());
    const size_t half = s.size() / 2;
    return s.size() % 2 == 1 ? s[half] : (s[half - 1] + s[half]) / 2;
  }
  double fastest() const { return *std::min_element(seconds.begin(), seconds.end()); }
  double slowest() const { return *std::max_element(seconds.begin(), seconds.end()); }

  double macs_per_second() const {
    return static_cast<double>(int8_macs + floating_macs) / median();
  }
  double int8_per_second() const { return static_cast<double>(int8_macs) / median(); }
  /// INT8 multiply-adds over what the peak could do in the whole time of the call.
  double share(const Peak& p) const { return int8_per_second() / p.int8; }
  /// The same over the time that is left when floating-point multiply-adds are charged at FMA peak.
  double share_of_int8_part(const Peak& p) const {
    const double left = median() - static_cast<double>(floating_macs) / p.fp32;
    return static_cast<double>(int8_macs) / (left * p.int8);
  }
};

struct Measured {
  AttnCase c;
  std::string implementation;
  int tile_q = 0, tile_k = 0;
  std::vector<Pass> passes;  // forward, backward, both
};

template <typename F>
double timed(F&& f) {
  const auto start = std::chrono::steady_clock::now();
  f();
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
}

Measured measure(const AttnCase& c, const BenchOptions& o) {
  const AttentionRun run(c, trace::make_inputs(c, trace::InputKind::gaussian));
  const Candidate forward = run.forward_choice(), backward = run.backward_choice();
  const auto macs = [&](Direction d) { return count_macs(c, d, backward.tile_k); };
  const spec::MacCounts f = macs(Direction::forward), b = macs(Direction::backward);
  Measured m{c, backward.name, backward.tile_q, backward.tile_k, {}};
  if (forward.name != backward.name) m.implementation = forward.name + " / " + backward.name;
  m.passes = {{"forward", {}, f.int8(), f.floating()},
              {"backward", {}, b.int8(), b.floating()},
              {"both", {}, f.int8() + b.int8(), f.floating() + b.floating()}};
  for (int i = 0; i < o.warmup; ++i) run.forward(), run.backward();
  for (int i = 0; i < o.reps; ++i) {
    const double tf = timed([&] { run.forward(); }), tb = timed([&] { run.backward(); });
    m.passes[0].seconds.push_back(tf);
    m.passes[1].seconds.push_back(tb);
    m.passes[2].seconds.push_back(tf + tb);
  }
  return m;
}

std::string percent(double x) { return fixed(100 * x, 1) + "%"; }

std::string show_peaks(const std::vector<Peak>& peaks, int threads) {
  std::string text =
      "Measured peak, " + std::to_string(threads) + (threads == 1 ? " thread" : " threads") + "\n";
  if (peaks.empty())
    return text + "  none of this program's loops runs on this CPU: no shares below\n";
  for (const Peak& p : peaks)
    text += "  " + p.isa + ": INT8 " + fixed(p.int8 / 1e9, 1) + " GMAC/s (" + p.instructions +
            "), FP32 FMA " + fixed(p.fp32 / 1e9, 1) + " GMAC/s\n";
  if (has_feature("amx-int8"))
    text +=
        "  This CPU also has AMX. No implementation uses it, and it is not part of these peaks.\n";
  return text;
}

std::string show(const std::vector<Measured>& all, const std::vector<Peak>& peaks) {
  Table table({{"pass", Side::left},
               {"ms"},
               {"min…max"},
               {"GMAC/s"},
               {"INT8 GMAC/s"},
               {"share of peak"},
               {"INT8 part"}});
  for (const Measured& m : all) {
    const Peak* peak = peak_for(peaks, m.implementation);
    table.heading(m.c.to_string() + "\n" + m.implementation + ", tiles " +
                  std::to_string(m.tile_q) + "×" + std::to_string(m.tile_k) +
                  (peak ? ", against the " + peak->isa + " peak" : ""));
    for (const Pass& p : m.passes)
      table.row({p.name, fixed(p.median() * 1e3, 2),
                 fixed(p.fastest() * 1e3, 1) + "…" + fixed(p.slowest() * 1e3, 1),
                 fixed(p.macs_per_second() / 1e9, 1), fixed(p.int8_per_second() / 1e9, 1),
                 peak ? percent(p.share(*peak)) : "-",
                 peak ? percent(p.share_of_int8_part(*peak)) : "-"});
  }
  return table.to_string();
}

json to_json(const Pass& p, const Peak* peak) {
  json j{{"median_ms", p.median() * 1e3},
         {"min_ms", p.fastest() * 1e3},
         {"max_ms", p.slowest() * 1e3},
         {"int8_macs", p.int8_macs},
         {"floating_macs", p.floating_macs},
         {"gmacs", p.macs_per_second() / 1e9},
         {"int8_gmacs", p.int8_per_second() / 1e9}};
  if (peak != nullptr) {
    j["share_of_peak"] = p.share(*peak);
    j["share_of_peak_int8_part"] = p.share_of_int8_part(*peak);
  }
  return j;
}

json to_json(const std::vector<Measured>& all, const std::vector<Peak>& peaks,
             const BenchOptions& o, const std::string& command_line) {
  json j = record_head(command_line);
  j["reps"] = o.reps;
  j["peaks"] = json::array();
  for (const Peak& p : peaks)
    j["peaks"].push_back({{"isa", p.isa},
                          {"instructions", p.instructions},
                          {"int8_gmacs", p.int8 / 1e9},
                          {"fp32_gmacs", p.fp32 / 1e9}});
  j["results"] = json::array();
  for (const Measured& m : all) {
    const Peak* peak = peak_for(peaks, m.implementation);
    json r{{"case", m.c.to_string()}, {"impl", m.implementation}, {"tile", {m.tile_q, m.tile_k}}};
    if (peak != nullptr) r["peak"] = peak->isa;
    for (const Pass& p : m.passes) r[p.name] = to_json(p, peak);
    j["results"].push_back(std::move(r));
  }
  return j;
}

void run(const BenchOptions& o, const std::string& command_line) {
  o.run.apply();
  std::vector<AttnCase> cases;
  for (const std::string& text : o.cases) cases.push_back(AttnCase::parse(text));
  for (const AttnCase& c : cases)
    chosen(explain(backward_shape(c)));  // refuse before any measuring

  const int threads = default_threads();
  const std::vector<Peak> peaks = measure_peaks(threads, o.peak_seconds);
  std::fputs((show_peaks(peaks, threads) + "\n").c_str(), stdout);
  std::fflush(stdout);
  std::vector<Measured> all;
  {
    Progress progress(static_cast<int>(cases.size()), o.run.talk());
    for (const AttnCase& c : cases) {
      all.push_back(measure(c, o));
      progress.done(c.to_string());
    }
  }
  std::fputs(show(all, peaks).c_str(), stdout);
  if (!o.json_path.empty())
    write_file(o.json_path, to_json(all, peaks, o, command_line).dump(1) + "\n");
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
  command->add_option("--reps", o->reps, "Timed runs per case; the median counts")
      ->capture_default_str()
      ->check(CLI::Range(1, 100000));
  command->add_option("--warmup", o->warmup, "Runs before that")
      ->capture_default_str()
      ->check(CLI::Range(0, 1000));
  command->add_option("--json", o->json_path, "Write the figures to this file")->type_name("FILE");
  add_run_options(*command, o->run);
  command->footer(
      "What the columns mean:\n"
      "  ms             median wall time of the whole call through the public API: quantisation, "
      "smoothing,\n"
      "                 softmax and the floating-point dP are all inside. Inputs are random.\n"
      "  GMAC/s         multiply-adds of all matmuls over that time. Only visible (query, key) "
      "pairs count.\n"
      "  INT8 GMAC/s    the INT8 ones of them: dP never is, nor the leading key tiles of P·V that "
      "stay in\n"
      "                 floating point (pv16).\n"
      "  share of peak  INT8 multiply-adds / (wall time × INT8 peak).\n"
      "  INT8 part      the same, with floating-point multiply-adds taken out of the time at FMA "
      "peak:\n"
      "                 INT8 multiply-adds / ((wall time − floating multiply-adds / FMA peak) × "
      "INT8 peak).\n"
      "The peaks are measured when the program starts, with as many threads as the calls use, by "
      "loops that\n"
      "touch registers only (AVX2: vpmaddubsw + vpmaddwd + vpaddd; AVX-512 VNNI: vpdpbusd; FP32: "
      "fused\n"
      "multiply-add). A call is held against the peak of the instruction set its implementation "
      "uses.\n\n"
      "Examples:\n"
      "  sagebwd bench\n"
      "  sagebwd bench \"h8 n4096 d64 causal\" \"h8 n4096 d64 causal paper\" --reps 21 --threads "
      "1\n"
      "  sagebwd bench --impl cpu-avx2 --json bench.json");
  command->callback([o, command_line] { run(*o, command_line); });
}

}  // namespace sagebwd::cli
