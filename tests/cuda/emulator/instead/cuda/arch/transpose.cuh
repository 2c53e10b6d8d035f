// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>

#include "emulator/block.h"

namespace sagebwd::cuda::arch {

struct Transposition {
  uint32_t x, y;
};

inline uint32_t transpose_8x8(uint32_t x) {
  Transposition mine{x, 0};
  emulator::meet<Transposition>(mine, [](emulator::Lanes<Transposition> all) {
    for (unsigned lane = 0; lane < emulator::kLanes; ++lane)
      for (unsigned h = 0; h < 2; ++h) {
        const unsigned row = lane % 4 * 2 + h, col = lane / 4;
        const uint32_t element = all[row * 4 + col / 2].x >> (16 * (col % 2)) & 0xffffu;
        all[lane].y |= element << (16 * h);
      }
  });
  return mine.y;
}

}  // namespace sagebwd::cuda::arch
