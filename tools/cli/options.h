// SPDX-License-Identifier: Apache-2.0
// What several commands share: options, the head of every record, and writing files.
#pragma once

#include <nlohmann/json_fwd.hpp>
#include <string>
#include <vector>

#include "progress.h"
#include "spec/attn_case.h"

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

/// A file of the command line.
struct NamedFile {
  const char* option;
  std::string path;  // empty: not given
};
/// Throws an Error when a file that the command writes is another of its files, by whatever name.
/// Asked before any work.
void check_apart(const std::vector<NamedFile>& read, const std::vector<NamedFile>& written);

/// Text that may be printed: control characters, which a terminal would obey, as \\x1b and so on.
std::string printable(const std::string& text);

/// JSON as text. Bytes of file names that are not UTF-8 are replaced.
std::string json_text(const nlohmann::json& record);

/// An Error that names the file when it cannot be written.
void write_file(const std::string& path, const std::string& text);

}  // namespace sagebwd::cli
