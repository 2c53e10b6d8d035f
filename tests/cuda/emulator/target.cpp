// SPDX-License-Identifier: Apache-2.0
// Compiled once per target, like the kernels.
#include "emulator/target.h"

#include "emulator/options.h"

namespace sagebwd::emulator {
namespace {

/// From the CUDA programming guide, table of compute capabilities. Not the kernels' own table
/// (cuda/arch/target.cuh), so that a wrong entry there is found.
constexpr int kilobytes_of(int target) {
  switch (target) {
    case 800:
      return 164;
    case 860:
    case 890:
    case 1200:
      return 100;
    case 900:
    case 1000:
      return 228;
  }
  throw "a target that is not named here";
}
constexpr int kKilobytes = kilobytes_of(__CUDA_ARCH__);

}  // namespace

int target() { return __CUDA_ARCH__; }
int shared_memory() {
  const int asked = options().shared_memory;
  return asked > 0 ? asked : kKilobytes << 10;
}
int shared_memory_of_block() { return shared_memory() - (1 << 10); }

}  // namespace sagebwd::emulator
