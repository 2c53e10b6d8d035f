// SPDX-License-Identifier: Apache-2.0
// What several commands share: options, the head of every record, and writing files.
#pragma once

#include <nlohmann/json_fwd.hpp>
#include <string>
#include <vector>

#include "progress.h"

namespace CLI {
class App;
}

namespace sagebwd::cli {

struct RunOptions {
  std::string implementation;  // empty: the dispatcher's choice
  int threads = 0;             // 0: the library's default
  bool verbose = false;
  bool quiet = false;

  Talk talk() const { return quiet ? Talk::quiet : verbose ? Talk::verbose : Talk::automatic; }
  /// Pins the implementation and the number of threads for this process.
  void apply() const;
};

/// --impl, --threads, --verbose, --quiet.
void add_run_options(CLI::App& command, RunOptions& options);

/// Version, command, date, CPU and threads: what a reader needs to repeat a result.
nlohmann::json record_head(const std::string& command_line);

/// An Error that names the file when it cannot be written.
void write_file(const std::string& path, const std::string& text);

}  // namespace sagebwd::cli
