// SPDX-License-Identifier: Apache-2.0
// The sagebwd program: error traces, benchmarks and a description of what this machine can do.
#include <CLI/CLI.hpp>
#include <cstdio>
#include <exception>
#include <new>
#include <stdexcept>
#include <string>
#include <vector>

#include "base/suggest.h"
#include "commands.h"
#include "options.h"
#include "sagebwd/attention.h"

namespace {

/// Printed below the options by --help.
constexpr const char* kHelp = R"(Examples:
  sagebwd info                                     what this machine can run, and why
  sagebwd report                                   accuracy page: report.html and report.json
  sagebwd trace --sigma 1,5 --n 2048 --lift each   which matmul costs which error
  sagebwd recipe                                   the switches of recipes, and what they mean
  sagebwd bench "h8 n4096 d64 causal"              time, multiply-adds per second, share of peak

"sagebwd COMMAND --help" explains each command.)";

constexpr int kUserError = 2;
constexpr int kFailure = 1;

/// Messages of the library may have several lines, one per refusal. A terminal gets them in one.
std::string one_line(std::string text) {
  std::string out;
  bool space = false;
  for (char c : text) {
    if (c == '\n') {
      out += out.ends_with(':') ? "" : ";";
      space = true;
    } else if (c != ' ' || !space) {
      if (space) out += ' ';
      space = c == ' ';
      if (c != ' ') out += c;
    }
  }
  return out;
}

/// What is wrong with the command line. For a command or option that does not exist, the message
/// suggests the nearest one that does.
std::string explain(const CLI::ParseError& error, const CLI::App& app) {
  const auto chosen = app.get_subcommands();
  std::vector<std::string> commands, options;
  for (const CLI::App* c : app.get_subcommands({})) commands.push_back(c->get_name());
  for (const CLI::Option* o : (chosen.empty() ? app : *chosen[0]).get_options())
    for (const std::string& name : o->get_lnames()) options.push_back("--" + name);
  for (const std::string& word : app.remaining(true)) {
    if (word.starts_with("-"))
      return (chosen.empty() ? "there is" : chosen[0]->get_name() + " has") + " no option \"" +
             word + "\"" + sagebwd::did_you_mean(word.substr(0, word.find('=')), options);
    if (chosen.empty())
      return "there is no command \"" + word + "\"" + sagebwd::did_you_mean(word, commands);
  }
  return error.what();
}

int complain(const std::string& message, int code) {
  std::fprintf(stderr, "sagebwd: %s\n", sagebwd::cli::printable(one_line(message)).c_str());
  return code;
}

}  // namespace

int main(int argc, char** argv) {
  using namespace sagebwd::cli;
  CLI::App app{
      "INT8 attention, forward and backward: error traces, benchmarks, and what runs here.\n"};
  app.name("sagebwd");
  app.set_version_flag("--version", std::string("sagebwd ") + sagebwd::version());
  app.require_subcommand(1);
  app.footer(kHelp);

  const std::string command_line = join_command(argc, argv);
  add_trace(app, command_line);
  add_report(app, command_line);
  add_bench(app, command_line);
  add_info(app);
  add_recipe(app);

  try {
    app.parse(argc, argv);
  } catch (const CLI::Success& e) {  // --help, --version
    return app.exit(e);
  } catch (const CLI::ParseError& e) {
    return complain(explain(e, app) + " (sagebwd --help lists what is expected)", kUserError);
  } catch (const sagebwd::Error& e) {
    return complain(e.what(), e.kind() == sagebwd::ErrorKind::internal ? kFailure : kUserError);
  } catch (const std::length_error&) {  // a container that no memory holds
    return complain("out of memory; try fewer heads or a shorter sequence", kFailure);
  } catch (const std::bad_alloc&) {
    return complain("out of memory; try fewer heads or a shorter sequence", kFailure);
  } catch (const std::exception& e) {
    return complain(e.what(), kFailure);
  }
  return 0;
}
