// SPDX-License-Identifier: Apache-2.0
// The memory behind `extern __shared__`, one piece per thread of the system that runs blocks.
#pragma once

namespace sagebwd::emulator {

/// Makes the memory of a new block unlike anything a kernel could take for its own.
void fill_shared_memory(int used);

/// Whether nothing beyond what the launch asked for was written; fails otherwise.
void check_shared_memory(int used);

}  // namespace sagebwd::emulator
