// SPDX-License-Identifier: Apache-2.0
#include "options.h"

#include <CLI/CLI.hpp>
#include <cstdio>
#include <filesystem>
#include <fstream>
#include <nlohmann/json.hpp>

#include "attention_run.h"
#include "base/check.h"
#include "base/parallel.h"
#include "commands.h"
#include "machine.h"
#include "table.h"

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

namespace {

namespace fs = std::filesystem;

/// Where a path leads, even if no file is there yet.
fs::path target_of(fs::path path) {
  std::error_code error;
  for (int links = 0; links < 40 && fs::is_symlink(path, error); ++links)
    path = path.parent_path() / fs::read_symlink(path, error);
  return fs::weakly_canonical(path, error);
}

bool same_file(const std::string& a, const std::string& b) {
  std::error_code error;
  if (!fs::exists(a, error) || !fs::exists(b, error)) return target_of(a) == target_of(b);
  // Devices such as /dev/null may be named twice.
  return fs::is_regular_file(a, error) && fs::equivalent(a, b, error);
}

}  // namespace

void check_apart(const std::vector<NamedFile>& read, const std::vector<NamedFile>& written) {
  const auto refuse = [](const NamedFile& to, const NamedFile& other, const char* why) {
    SAGE_CHECK(to.path.empty() || other.path.empty() || !same_file(to.path, other.path),
               to.option << " " << to.path << ": expected a file of its own, got the one of "
                         << other.option << ", " << why);
  };
  for (size_t i = 0; i < written.size(); ++i) {
    for (const NamedFile& r : read) refuse(written[i], r, "which would be overwritten");
    for (size_t j = 0; j < i; ++j) refuse(written[i], written[j], "which would be lost");
  }
}

std::string printable(const std::string& text) {
  std::string out;
  for (size_t i = 0; i < text.size(); ++i) {
    const auto c = static_cast<unsigned char>(text[i]);
    const auto next = static_cast<unsigned char>(i + 1 < text.size() ? text[i + 1] : 0);
    // U+0080 to U+009F are control characters too, of two bytes in UTF-8.
    const bool wide = c == 0xC2 && next >= 0x80 && next < 0xA0;
    if (c >= 0x20 && c != 0x7F && !wide) {
      out += text[i];
      continue;
    }
    char escape[8];
    std::snprintf(escape, sizeof(escape), "\\x%02x", wide ? next : c);
    out += escape;
    i += wide;
  }
  return out;
}

std::string json_text(const nlohmann::json& record) {
  return record.dump(1, ' ', false, nlohmann::json::error_handler_t::replace) + "\n";
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
