// SPDX-License-Identifier: Apache-2.0
#include "page_maker.h"

#include <spawn.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cstdio>
#include <cstdlib>
#include <memory>
#include <nlohmann/json.hpp>

#include "base/check.h"
#include "options.h"

extern char** environ;

namespace sagebwd::cli {
namespace {

const char* python() {
  const char* name = std::getenv("SAGEBWD_PYTHON");
  return name != nullptr && *name != '\0' ? name : nullptr;
}

}  // namespace

bool has_page_maker() { return python() != nullptr; }

void need_page_maker(const char* option) {
  SAGE_CHECK(has_page_maker(),
             option << ": pages are made by the Python package; install it (pip install .) and "
                       "start the program by its command \"sagebwd\", or write --json FILE and "
                       "run \"python -m sagebwd.pages FILE PAGE\" where it is installed");
}

void make_page(const nlohmann::json& record, const std::string& path) {
  const std::string text = json_text(record);
  const std::unique_ptr<std::FILE, int (*)(std::FILE*)> file(std::tmpfile(), std::fclose);
  SAGE_CHECK(file != nullptr &&
                 std::fwrite(text.data(), 1, text.size(), file.get()) == text.size() &&
                 std::fflush(file.get()) == 0,
             path << ": a temporary file could not be written, is the disk full?");
  std::rewind(file.get());

  posix_spawn_file_actions_t actions;
  posix_spawn_file_actions_init(&actions);
  posix_spawn_file_actions_adddup2(&actions, fileno(file.get()), STDIN_FILENO);
  const char* const command[] = {python(), "-m", "sagebwd.pages", "-", path.c_str(), nullptr};
  pid_t child = 0;
  const int failed = posix_spawnp(&child, command[0], &actions, nullptr,
                                  const_cast<char* const*>(command), environ);
  posix_spawn_file_actions_destroy(&actions);
  int status = -1;
  if (failed == 0) waitpid(child, &status, 0);
  SAGE_CHECK(status == 0, path << ": the page could not be made by \"" << command[0]
                               << " -m sagebwd.pages\" (SAGEBWD_PYTHON)");
}

}  // namespace sagebwd::cli
