// SPDX-License-Identifier: Apache-2.0
#include "bench_run.h"

#include <algorithm>
#include <chrono>
#include <nlohmann/json.hpp>

#include "attention_run.h"
#include "base/parallel.h"
#include "machine.h"
#include "table.h"

namespace sagebwd::cli {
namespace {

using nlohmann::json;
using spec::AttnCase;
using spec::Direction;

template <typename F>
double timed(F&& f) {
  const auto start = std::chrono::steady_clock::now();
  f();
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
}

double median_of(std::vector<double> x) {
  std::sort(x.begin(), x.end());
  const size_t half = x.size() / 2;
  return x.size() % 2 == 1 ? x[half] : (x[half - 1] + x[half]) / 2;
}

spec::Pairs pairs_of(const AttnCase& c, const trace::Lists& lists) {
  if (!c.has_lists()) return count_pairs(c);
  spec::Problem p = c.problem();
  p.blocks = lists.view();
  return count_listed_pairs(p);
}

Measured measure(const AttnCase& c, const BenchSettings& settings, int threads) {
  const trace::Inputs in = trace::make_inputs(c, trace::InputKind::gaussian);
  const trace::Lists lists = trace::make_lists(c, in);
  const AttentionRun run(c, in, lists);
  const Candidate forward = run.forward_choice(), backward = run.backward_choice();
  const spec::Pairs pairs = pairs_of(c, lists);
  const spec::MacCounts f = count_macs(c, Direction::forward, pairs);
  const spec::MacCounts b = count_macs(c, Direction::backward, pairs);
  Measured m{c, backward.name, backward.tile_q, backward.tile_k, {}, {}};
  if (forward.name != backward.name) m.implementation = forward.name + " / " + backward.name;
  m.passes = {{"forward", {}, f.int8(), f.floating()},
              {"backward", {}, b.int8(), b.floating()},
              {"both", {}, f.int8() + b.int8(), f.floating() + b.floating()}};
  const PeakLoops* loops = loops_for(peak_loops(), backward.name);
  std::vector<double> int8, fp32;
  for (int i = 0; i < settings.warmup; ++i) run.forward(), run.backward();
  for (int i = 0; i < settings.reps; ++i) {
    // Peak and calls take turns, so that clocks and other work on the machine change both alike.
    if (loops != nullptr) {
      const Peak p = measure_peak(*loops, threads, settings.peak_seconds);
      int8.push_back(p.int8), fp32.push_back(p.fp32);
    }
    const double tf = timed([&] { run.forward(); }), tb = timed([&] { run.backward(); });
    m.passes[0].seconds.push_back(tf);
    m.passes[1].seconds.push_back(tb);
    m.passes[2].seconds.push_back(tf + tb);
  }
  if (loops != nullptr)
    m.peak = Peak{loops->isa, loops->instructions, median_of(int8), median_of(fp32)};
  return m;
}

std::string share_text(double x) { return fixed(100 * x, 1) + "%"; }

json to_json(const Pass& p, const std::optional<Peak>& peak) {
  json j{{"median_ms", p.median() * 1e3},
         {"min_ms", p.fastest() * 1e3},
         {"max_ms", p.slowest() * 1e3},
         {"int8_macs", p.int8_macs},
         {"floating_macs", p.floating_macs},
         {"gmacs", p.macs_per_second() / 1e9},
         {"int8_gmacs", p.int8_per_second() / 1e9}};
  if (peak) {
    j["share_of_peak"] = p.share(*peak);
    j["share_of_peak_int8_part"] = p.share_of_int8_part(*peak);
  }
  return j;
}

}  // namespace

double Pass::median() const { return median_of(seconds); }
double Pass::fastest() const { return *std::min_element(seconds.begin(), seconds.end()); }
double Pass::slowest() const { return *std::max_element(seconds.begin(), seconds.end()); }

double Pass::macs_per_second() const {
  return static_cast<double>(int8_macs + floating_macs) / median();
}
double Pass::int8_per_second() const { return static_cast<double>(int8_macs) / median(); }

double Pass::share(const Peak& p) const { return int8_per_second() / p.int8; }

double Pass::share_of_int8_part(const Peak& p) const {
  const double left = median() - static_cast<double>(floating_macs) / p.fp32;
  return static_cast<double>(int8_macs) / (left * p.int8);
}

Benchmark run_benchmark(const std::vector<AttnCase>& cases, const BenchSettings& settings,
                        Talk talk) {
  for (const AttnCase& c : cases) chosen(explain(backward_shape(c)));  // refuse before measuring
  Benchmark b;
  b.threads = default_threads(), b.reps = settings.reps;
  Progress progress(static_cast<int>(cases.size()), talk);
  for (const AttnCase& c : cases) {
    b.cases.push_back(measure(c, settings, b.threads));
    progress.done(c.to_string());
  }
  return b;
}

std::string bench_note(const Benchmark& b) {
  std::string text = "Shares are of the peak measured between the runs, " +
                     std::to_string(b.threads) + (b.threads == 1 ? " thread.\n" : " threads.\n");
  if (has_feature("amx-int8"))
    text += "This CPU also has AMX. No implementation uses it, and no peak counts it.\n";
  return text;
}

std::string bench_table(const Benchmark& b) {
  Table table({{"pass", Side::left},
               {"ms"},
               {"min…max"},
               {"GMAC/s"},
               {"INT8 GMAC/s"},
               {"share of peak"},
               {"INT8 part"}});
  for (const Measured& m : b.cases) {
    const std::optional<Peak>& peak = m.peak;
    table.heading(m.c.to_string() + "\n" + m.implementation + ", tiles " +
                  std::to_string(m.tile_q) + "×" + std::to_string(m.tile_k) +
                  (peak ? ", peak of " + peak->isa + ": INT8 " + fixed(peak->int8 / 1e9, 0) +
                              ", FP32 " + fixed(peak->fp32 / 1e9, 0) + " GMAC/s"
                        : ""));
    for (const Pass& p : m.passes)
      table.row({p.name, fixed(p.median() * 1e3, 2),
                 fixed(p.fastest() * 1e3, 1) + "…" + fixed(p.slowest() * 1e3, 1),
                 fixed(p.macs_per_second() / 1e9, 1), fixed(p.int8_per_second() / 1e9, 1),
                 peak ? share_text(p.share(*peak)) : "-",
                 peak ? share_text(p.share_of_int8_part(*peak)) : "-"});
  }
  return table.to_string();
}

json bench_json(const Benchmark& b) {
  json j{{"reps", b.reps}, {"results", json::array()}};
  for (const Measured& m : b.cases) {
    const std::optional<Peak>& peak = m.peak;
    json r{{"case", m.c.to_string()}, {"impl", m.implementation}, {"tile", {m.tile_q, m.tile_k}}};
    if (peak)
      r["peak"] = {{"isa", peak->isa},
                   {"instructions", peak->instructions},
                   {"int8_gmacs", peak->int8 / 1e9},
                   {"fp32_gmacs", peak->fp32 / 1e9}};
    for (const Pass& p : m.passes) r[p.name] = to_json(p, peak);
    j["results"].push_back(std::move(r));
  }
  return j;
}

}  // namespace sagebwd::cli
