// SPDX-License-Identifier: Apache-2.0
#include "options.h"

#include <CLI/CLI.hpp>
#include <fstream>
#include <nlohmann/json.hpp>

#include "attention_run.h"
#include "base/check.h"
#include "base/parallel.h"
#include "commands.h"
#include "machine.h"

namespace sagebwd::cli {

void RunOptions::apply() const {
  if (threads > 0) set_threads(threads);
  if (!implementation.empty()) pin_implementation(implementation);
}

void add_run_options(CLI::App& command, RunOptions& o) {
  command
      .add_option("--impl", o.implementation,
                  "Run this implementation instead of the best one (see sagebwd info)")
      ->type_name("NAME");
  command.add_option("--threads", o.threads, "Number of threads; default: all cores")
      ->type_name("N")
      ->check(CLI::Range(1, 4096).description(""));
  auto* verbose = command.add_flag("-v,--verbose", o.verbose, "Print progress line by line");
  command.add_flag("-q,--quiet", o.quiet, "Print no progress")->excludes(verbose);
}

nlohmann::json record_head(const std::string& command_line) {
  return {{"tool", "sagebwd"}, {"version", version()}, {"command", command_line},
          {"date", today()},   {"cpu", cpu_model()},   {"threads", default_threads()}};
}

void write_file(const std::string& path, const std::string& text) {
  std::ofstream out(path, std::ios::binary);
  SAGE_CHECK(out.is_open(), path << ": cannot be written");
  out << text;
  out.close();
  SAGE_CHECK(out.good(), path << ": writing failed, is the disk full?");
}

std::string join_command(int argc, const char* const* argv) {
  std::string line = "sagebwd";
  for (int i = 1; i < argc; ++i) {
    const std::string word = argv[i];
    const bool plain =
        !word.empty() && word.find_first_of(" \t\n'\"\\$`*?;&|<>()") == std::string::npos;
    line += " ";
    if (plain) {
      line += word;
      continue;
    }
    line += "'";
    for (char c : word) line += c == '\'' ? std::string("'\\''") : std::string(1, c);
    line += "'";
  }
  return line;
}

}  // namespace sagebwd::cli
