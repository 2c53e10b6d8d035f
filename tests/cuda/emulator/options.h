// SPDX-License-Identifier: Apache-2.0
// What the environment says about the emulated GPU.
#pragma once

#include <cstdint>

namespace sagebwd::emulator {

struct Options {
  /// SAGEBWD_EMULATOR_COPIES=late: asynchronous copies and products of warpgroups happen at the
  /// last moment, when somebody waits for them; else (early) at once. Right code works with both:
  /// the first finds a missing wait, the second a copy over memory that is still being read.
  bool late_copies;
  /// SAGEBWD_EMULATOR_SEED: another order of warps.
  uint64_t seed;
  /// SAGEBWD_EMULATOR_SHARED_MEMORY: of a multiprocessor, in bytes; 0: what the target has.
  int shared_memory;
  /// SAGEBWD_EMULATOR_LAUNCHES: a file to which the address of every kernel that ran is written.
  const char* launches;
};

const Options& options();

}  // namespace sagebwd::emulator
