// SPDX-License-Identifier: Apache-2.0
// sagebwd info: what this machine can run, and why.
#include <CLI/CLI.hpp>
#include <cstdio>
#include <cstdlib>
#include <memory>

#include "attention_run.h"
#include "base/parallel.h"
#include "commands.h"
#include "machine.h"
#include "options.h"
#include "sagebwd/build.h"
#include "table.h"

namespace sagebwd::cli {
namespace {

/// Printed below the options by --help.
constexpr const char* kHelp =
    R"(Prints the version, CPU features, threads and GPUs, then every implementation in the order in which
it is asked, with its tile sizes or the reason why it declines.

Examples:
  sagebwd info
  sagebwd info "h32 hk8 n8192 d128 causal f16" "d80 paper"
  sagebwd info "h8 n16384 keep=0.05 blocks=128x64")";

struct InfoOptions {
  std::vector<std::string> cases{"b1 h8 n4096 d64 causal"};
};

std::string environment(const char* name, const char* meaning) {
  const char* value = std::getenv(name);
  const std::string shown = value == nullptr ? "not set" : "\"" + std::string(value) + "\"";
  return std::string("  ") + name + " is " + shown + ": " + meaning + "\n";
}

std::string show_machine() {
  std::string text =
      std::string("sagebwd ") + version() + ", built for " + describe_build() + "\n\nMachine\n";
  text += "  CPU      " + cpu_model() + "\n  has     ";
  std::string missing;
  for (const Feature& f : cpu_features()) (f.present ? text : missing) += std::string(" ") + f.name;
  if (!missing.empty()) text += "\n  lacks   " + missing;
  text += "\n  threads  " + std::to_string(default_threads()) + "\n  GPU      ";
  const char* indent = "";
  for (const std::string& gpu : describe_gpus()) {
    text += indent + gpu + "\n";
    indent = "           ";
  }
  return text;
}

std::string show_candidates(const std::vector<Candidate>& candidates) {
  Table table(
      {{"", Side::left}, {"implementation", Side::left}, {"tiles"}, {"answer", Side::left}});
  for (const Candidate& c : candidates)
    table.row({c.chosen ? "  →" : "   ", c.name, c.supported ? c.tiles("×") : "",
               c.chosen      ? "chosen"
               : c.supported ? "able, but a better one comes first"
                             : "declines: " + c.reason});
  return table.to_string();
}

std::string show_case(const spec::AttnCase& c, Device device, const std::string& where) {
  ForwardArgs forward = forward_shape(c);
  BackwardArgs backward = backward_shape(c);
  forward.device = backward.device = device;
  return "\nForward" + where + ", best first\n" + show_candidates(explain(forward)) + "\nBackward" +
         where + ", best first\n" + show_candidates(explain(backward));
}

void run(const InfoOptions& o) {
  std::string text = show_machine();
  text += "\nEnvironment\n";
  text += environment("SAGEBWD_IMPL", "pins one implementation by name");
  text +=
      environment("SAGEBWD_THREADS", "number of threads where the caller brings none of its own");
  text += environment("SAGEBWD_PYTHON", "the Python whose package makes pages (--html)");
  for (const std::string& line : o.cases) {
    const auto c = spec::AttnCase::parse(line);
    text += "\nCase " + c.to_string() + "\n" + show_case(c, Device::cpu, "");
    if (has_cuda()) text += show_case(c, Device::cuda, " in GPU memory");
  }
  std::fputs(text.c_str(), stdout);
}

}  // namespace

void add_info(CLI::App& app) {
  auto* command = app.add_subcommand("info", "What this machine can run, and why");
  auto o = std::make_shared<InfoOptions>();
  command
      ->add_option(
          "case", o->cases,
          "Case strings to explain, such as \"b1 h8 hk2 n4096 d64 causal bf16 vectorwise\"")
      ->type_name("CASE");
  command->footer(kHelp);
  command->callback([o] { run(*o); });
}

}  // namespace sagebwd::cli
