// SPDX-License-Identifier: Apache-2.0
// Blocks that run at the same time take turns: who goes on when follows from the seed alone, so a
// failure can be repeated, and a block that waits for another one really finds it half done.
#pragma once

namespace sagebwd::emulator {

/// Lets the other blocks of the grid go on for a while.
void let_other_blocks_go();

}  // namespace sagebwd::emulator
