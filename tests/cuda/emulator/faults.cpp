// SPDX-License-Identifier: Apache-2.0
#include "emulator/faults.h"

#include <cstdio>
#include <cstdlib>
#include <cstring>

#include "emulator/block.h"

namespace sagebwd::emulator {
namespace {

struct Asked {
  Fault fault = Fault::none;
  int number = 0, threads = 0;

  Asked() {
    constexpr const char* kNames[] = {"none",     "wait",    "parity",       "bytes",
                                      "arrivals", "arrive",  "copy_place",   "swizzle",
                                      "a_place",  "b_place", "product_wait", "pending",
                                      "commit",   "fence",   "sums",         "named_barrier"};
    const char* text = std::getenv("SAGEBWD_EMULATOR_FAULT");
    if (text == nullptr || *text == '\0') return;
    const size_t length = std::strcspn(text, ":/");
    for (size_t i = 0; i < std::size(kNames); ++i)
      if (std::strlen(kNames[i]) == length && std::strncmp(kNames[i], text, length) == 0)
        fault = static_cast<Fault>(i);
    if (text[length] == ':') number = std::atoi(text + length + 1);
    const char* size = std::strchr(text, '/');
    threads = size != nullptr ? std::atoi(size + 1) : 0;
    if (fault == Fault::none || threads == 0) {
      std::fprintf(stderr, "SAGEBWD_EMULATOR_FAULT: expected a fault like parity:3/512, got %s\n",
                   text);
      std::exit(2);
    }
  }
};

}  // namespace

bool has_fault(Fault fault, int number) {
  static const Asked asked;
  return asked.fault == fault && asked.number == number &&
         block->size.x == static_cast<unsigned>(asked.threads);
}

}  // namespace sagebwd::emulator
