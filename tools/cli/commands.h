// SPDX-License-Identifier: Apache-2.0
// The subcommands. Each adds itself to the program; its work runs as a callback of the parsed
// command line.
#pragma once

#include <string>

namespace CLI {
class App;
}

namespace sagebwd::cli {

/// The command line as typed, with quotes where a shell needs them: part of every record.
std::string join_command(int argc, const char* const* argv);

void add_trace(CLI::App& app, const std::string& command_line);
void add_report(CLI::App& app, const std::string& command_line);
void add_bench(CLI::App& app, const std::string& command_line);
void add_info(CLI::App& app);
void add_recipe(CLI::App& app);

}  // namespace sagebwd::cli
