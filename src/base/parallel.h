// SPDX-License-Identifier: Apache-2.0
// Loops over independent items, on the caller's threads or our own.
#pragma once

#include <cstdint>
#include <type_traits>

#include "sagebwd/types.h"

namespace sagebwd {

/// Threads the library uses when the caller brings none: SAGEBWD_THREADS up to 1024, else the cores
/// this process may run on.
int default_threads();

namespace detail {
void run_parallel(const ParallelFor& pf, int64_t count, void (*body)(void*, int64_t), void* user);
}

/// Runs body(i) for i in [0, count). The first exception of a body is rethrown here. It works with
/// any number of threads that the system is willing to start.
template <typename F>
void parallel_for(const ParallelFor& pf, int64_t count, F&& body) {
  using Body = std::remove_reference_t<F>;
  detail::run_parallel(
      pf, count, [](void* user, int64_t i) { (*static_cast<Body*>(user))(i); },
      const_cast<void*>(static_cast<const void*>(&body)));
}

}  // namespace sagebwd
