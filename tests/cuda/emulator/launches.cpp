// SPDX-License-Identifier: Apache-2.0
// Which kernels ran: their addresses as nm prints them, a line each, for every_kernel.sh.
#include <link.h>

#include <cstdio>
#include <set>

#include "emulator/block.h"
#include "emulator/options.h"

namespace sagebwd::emulator {
namespace {

/// Where the program was loaded; the program comes first in the list of what is loaded.
uintptr_t load_address() {
  uintptr_t address = 0;
  dl_iterate_phdr(
      [](dl_phdr_info* info, size_t, void* to) {
        *static_cast<uintptr_t*>(to) = info->dlpi_addr;
        return 1;
      },
      &address);
  return address;
}

}  // namespace

void note_launch(void (*kernel)()) {
  static std::set<void (*)()> known;
  if (options().launches == nullptr || !known.insert(kernel).second) return;
  std::FILE* file = std::fopen(options().launches, "a");
  if (file == nullptr) fail("SAGEBWD_EMULATOR_LAUNCHES cannot be written");
  std::fprintf(file, "%016lx\n", reinterpret_cast<uintptr_t>(kernel) - load_address());
  std::fclose(file);
}

}  // namespace sagebwd::emulator
