// SPDX-License-Identifier: Apache-2.0
// What a file with vector code offers to the peak measurement. Such files are compiled with flags
// for instructions that the running CPU may not have. This header therefore includes no library
// code that could be instantiated there and used elsewhere.
#pragma once

#include <cstdint>

namespace sagebwd::cli {

/// One instruction set's loops. `int8` and `fp32` run `rounds` rounds and return a value that
/// depends on all of them.
struct PeakLoops {
  const char* isa;           // "avx2"
  const char* instructions;  // what the INT8 loop is made of
  bool (*available)();       // on the running CPU
  int64_t int8_macs_per_round, fp32_macs_per_round;
  unsigned (*int8)(int64_t rounds);
  float (*fp32)(int64_t rounds);
};

#if defined(SAGEBWD_CLI_X86)
extern const PeakLoops kAvx2Loops;
extern const PeakLoops kAvx512VnniLoops;
#endif

}  // namespace sagebwd::cli
