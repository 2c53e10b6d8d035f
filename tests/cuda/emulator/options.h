// SPDX-License-Identifier: Apache-2.0
// What the environment says about the emulated GPU.
#pragma once

#include <cstdint>

namespace sagebwd::emulator {

struct Options {
  /// SAGEBWD_EMULATOR_COPIES=late: asynchronous copies happen at the last moment, when somebody
  /// waits for them; else (early) at once. Right code works with both: the first finds a missing
  /// wait, the second a copy over memory that is still being read.
  bool late_copies;
  /// SAGEBWD_EMULATOR_SEED: another order of warps.
  uint64_t seed;
  /// SAGEBWD_EMULATOR_SHARED_MEMORY: what a thread block may have, in bytes.
  int shared_memory;
};

const Options& options();

}  // namespace sagebwd::emulator
