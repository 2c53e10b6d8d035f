// SPDX-License-Identifier: Apache-2.0
// sagebwd report: the accuracy of two recipes on easy and hard inputs, as a table, a page and a
// record.
#include <CLI/CLI.hpp>
#include <cstdio>
#include <memory>
#include <nlohmann/json.hpp>

#include "bench_run.h"
#include "commands.h"
#include "memory.h"
#include "options.h"
#include "page.h"
#include "page_maker.h"
#include "table.h"
#include "trace_output.h"
#include "words.h"

namespace sagebwd::cli {
namespace {

/// Printed below the options by --help.
constexpr const char* kHelp =
    R"(Runs Gaussian inputs with σ = 1, 3, 5, 8 and 10, then hard ones: outlier channels, attention
sinks in several places, sharp heads, delimiters and long rows ("sagebwd trace --help" explains
them), each under recipes paper and vectorwise and without INT8. Ends with a verdict: which recipe
meets the limits (gates) for training. Takes two or three minutes on two idle cores.

Examples:
  sagebwd report
  sagebwd report --case "h8 n4096 d128 causal" --html accuracy.html)";

struct ReportOptions {
  std::string html_path;  // default: report.html, where the Python package makes it
  std::string json_path;  // default: beside the page
  bool quick = false;
  bool causal = false;
  std::string base_case;
  RunOptions run;
};

/// The page's path with its ending replaced.
std::string beside(const std::string& html) {
  const size_t dot = html.rfind('.'), slash = html.rfind('/');
  const bool ending = dot != std::string::npos && (slash == std::string::npos || dot > slash + 1);
  return (ending ? html.substr(0, dot) : html) + ".json";
}

TracePlan plan(const ReportOptions& o) {
  TraceRequest sweep, hard;
  sweep.base = parse_base_case(!o.base_case.empty() ? o.base_case
                               : o.quick            ? "h1 n256 d64"
                                                    : "h4 n2048 d64");
  sweep.base.mask.causal |= o.causal;
  check_memory(sweep.base);
  hard.base = sweep.base;
  sweep.yardstick = true;
  sweep.sigmas = {1, 3, 5, 8, 10};
  hard.inputs = {"outlier", "channels", "sink",        "sink_middle",
                 "sinks",   "previous", "delimiters7", "long"};
  TracePlan all = plan_trace(sweep, nullptr);
  for (Source& s : plan_trace(hard, nullptr).sources) all.sources.push_back(std::move(s));
  return all;
}

/// Breaks a paragraph at 100 columns.
std::string wrapped(const std::string& text) {
  constexpr size_t kColumns = 100;
  std::string out, line;
  size_t at = 0;
  while (at < text.size()) {
    const size_t end = std::min(text.find(' ', at), text.size());
    const std::string word = text.substr(at, end - at);
    if (!line.empty() && display_width(line) + 1 + display_width(word) > kColumns) {
      out += line + "\n";
      line.clear();
    }
    line += (line.empty() ? "" : " ") + word;
    at = end + 1;
  }
  return out + line + "\n";
}

void print(const Paragraphs& all) {
  for (const std::string& p : all) std::fputs(("\n" + wrapped(p)).c_str(), stdout);
}

void print_gates(const Results& results) {
  const auto all = verdicts(results);
  if (all.empty()) return;
  std::vector<Table::Column> columns{{"gate", Side::left}, {"inputs", Side::left}, {"limit"}};
  for (const RecipeVerdict& v : all) columns.push_back({v.recipe});
  Table table(columns);
  for (size_t i = 0; i < all[0].checks.size(); ++i) {
    const Check& gate = all[0].checks[i];
    std::vector<std::string> row{gate.what, gate.inputs, gate.limit};
    for (const RecipeVerdict& v : all)
      row.push_back(v.checks[i].value + (v.checks[i].passed ? " ✓" : " ✗"));
    table.row(std::move(row));
  }
  std::fputs(("\n" + table.to_string()).c_str(), stdout);
}

Benchmark measure_speed(const ReportOptions& o) {
  const std::string sizes = o.quick ? "h2 n512 d64 " : "h8 n4096 d64 ";
  std::vector<spec::AttnCase> cases;
  for (const char* mask : {"full", "causal"}) cases.push_back(spec::AttnCase::parse(sizes + mask));
  const BenchSettings settings = o.quick ? BenchSettings{3, 1, 0.05} : BenchSettings{5, 1, 0.3};
  return run_benchmark(cases, settings, o.run.talk());
}

void run(const ReportOptions& o, const std::string& command_line) {
  o.run.apply();
  if (!o.html_path.empty()) need_page_maker("--html");
  const std::string html_path = o.html_path.empty() ? "report.html" : o.html_path;
  const std::string json_path = o.json_path.empty() ? beside(html_path) : o.json_path;
  check_apart({}, {{"--html", html_path}, {"--json", json_path}});
  const TracePlan all = plan(o);
  const Benchmark speed = measure_speed(o);
  std::printf(
      "Accuracy of INT8 attention, %s\nRelative L2 errors against exact attention in FP64.\n\n",
      all.sources[0].shape.to_string().c_str());
  std::fflush(stdout);
  const Results results = run_trace(all, nullptr, o.run.talk());
  std::fputs(trace_table(results).c_str(), stdout);
  for (const Sweep& s : sweeps_of(results))
    print(s.has_several() ? sweep_words(results, s) : single_words(results, s));
  std::printf("\nSpeed, whole calls\n\n%s\n%s", bench_table(speed).c_str(),
              bench_note(speed).c_str());
  print_gates(results);
  print(verdict_words(results));

  nlohmann::json record = trace_json(results, command_line);
  record["speed"] = bench_json(speed);
  record["page"] = trace_page(results, {"Accuracy of INT8 attention", command_line, true, &speed});
  write_file(json_path, json_text(record));
  if (has_page_maker()) {
    make_page(record, html_path);
    std::printf("\nWrote %s and %s\n", html_path.c_str(), json_path.c_str());
  } else {
    std::printf(
        "\nWrote %s; where the Python package is installed, \"python -m sagebwd.pages %s %s\" "
        "makes a page of it\n",
        json_path.c_str(), json_path.c_str(), html_path.c_str());
  }
}

}  // namespace

void add_report(CLI::App& app, const std::string& command_line) {
  auto* command = app.add_subcommand(
      "report", "Accuracy of paper and vectorwise on easy and hard inputs, and speed, as a page");
  auto o = std::make_shared<ReportOptions>();
  command
      ->add_option("--html,--out", o->html_path,
                   "The page, which the Python package makes (default report.html)")
      ->type_name("FILE");
  command->add_option("--json", o->json_path, "The record; default: beside the page")
      ->type_name("FILE");
  auto* quick =
      command->add_flag("--quick", o->quick, "256 tokens and one head: seconds, for a first look");
  command->add_flag("--causal", o->causal, "Causal mask");
  command
      ->add_option("--case", o->base_case,
                   "Sizes, mask and element type (default \"h4 n2048 d64\")")
      ->type_name("CASE")
      ->excludes(quick);
  add_run_options(*command, o->run);
  command->footer(kHelp);
  command->callback([o, command_line] { run(*o, command_line); });
}

}  // namespace sagebwd::cli
