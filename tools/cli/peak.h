// SPDX-License-Identifier: Apache-2.0
// The multiply-add peaks of this machine, measured: loops that touch registers only, on all threads
// at once.
#pragma once

#include <string>
#include <vector>

#include "peak_loops.h"

namespace sagebwd::cli {

/// The instruction sets this program was built for, widest first.
const std::vector<PeakLoops>& peak_loops();

struct Peak {
  std::string isa, instructions;
  double int8 = 0, fp32 = 0;  // multiply-adds per second over all threads
};

/// Best rates of one instruction set, measured for about `seconds`.
Peak measure_peak(const PeakLoops& loops, int threads, double seconds);

/// The instruction set that an implementation is compared with: the one in its name ("cpu-avx2"),
/// or else the first one that the CPU has. Null if the CPU has none of `loops`.
const PeakLoops* loops_for(const std::vector<PeakLoops>& loops, const std::string& implementation);

}  // namespace sagebwd::cli
