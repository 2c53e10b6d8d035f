// SPDX-License-Identifier: Apache-2.0
#include "memory.h"

#include <unistd.h>

#include <cmath>

#include "base/check.h"

namespace sagebwd::cli {

void check_memory(const std::string& what, double bytes) {
  const double memory =
      static_cast<double>(sysconf(_SC_PHYS_PAGES)) * static_cast<double>(sysconf(_SC_PAGE_SIZE));
  constexpr double kGiB = 1024.0 * 1024.0 * 1024.0;
  SAGE_CHECK(bytes <= memory, what << ": needs " << std::llround(bytes / kGiB)
                                   << " GiB, but this machine has " << std::llround(memory / kGiB)
                                   << " GiB of memory; take fewer heads or a shorter sequence");
}

void check_memory(const spec::AttnCase& c) {
  // q and dq, o and dout, k and dk, v and dv.
  const double rows = 2.0 * static_cast<double>(c.b) *
                      (static_cast<double>(c.h) * static_cast<double>(c.nq) +
                       static_cast<double>(c.hk) * static_cast<double>(c.nk));
  check_memory("case \"" + c.to_string() + "\"", rows * static_cast<double>(c.d + c.value_dim()) *
                                                     static_cast<double>(dtype_size(c.dtype)));
}

}  // namespace sagebwd::cli
