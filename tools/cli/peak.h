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

/// Measures every instruction set the CPU has, for about `seconds` each.
std::vector<Peak> measure_peaks(int threads, double seconds);

/// The peak an implementation is held against: that of the instruction set in its name
/// ("cpu-avx2"), or the machine's best where the name has none. Null when the list is empty.
const Peak* peak_for(const std::vector<Peak>& peaks, const std::string& implementation);

}  // namespace sagebwd::cli
