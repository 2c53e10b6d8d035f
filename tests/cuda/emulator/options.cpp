// SPDX-License-Identifier: Apache-2.0
#include "emulator/options.h"

#include <cstdio>
#include <cstdlib>
#include <cstring>

namespace sagebwd::emulator {
namespace {

const char* from_environment(const char* name, const char* otherwise) {
  const char* text = std::getenv(name);
  return text != nullptr && *text != '\0' ? text : otherwise;
}

bool late_copies() {
  const char* when = from_environment("SAGEBWD_EMULATOR_COPIES", "early");
  if (std::strcmp(when, "early") != 0 && std::strcmp(when, "late") != 0) {
    std::fprintf(stderr, "SAGEBWD_EMULATOR_COPIES: expected early or late, got %s\n", when);
    std::exit(2);
  }
  return std::strcmp(when, "late") == 0;
}

}  // namespace

const Options& options() {
  static const Options all{
      .late_copies = late_copies(),
      .seed = std::strtoull(from_environment("SAGEBWD_EMULATOR_SEED", "1"), nullptr, 10),
      .shared_memory = std::atoi(from_environment("SAGEBWD_EMULATOR_SHARED_MEMORY", "0")),
      .launches = from_environment("SAGEBWD_EMULATOR_LAUNCHES", nullptr),
  };
  return all;
}

}  // namespace sagebwd::emulator
