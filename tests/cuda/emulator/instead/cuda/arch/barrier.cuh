// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "emulator/block.h"

namespace sagebwd::cuda::arch {

inline void barrier_sync(int id, int threads) { emulator::block->barrier(id, threads); }

}  // namespace sagebwd::cuda::arch
