// SPDX-License-Identifier: Apache-2.0
#include "emulator/shared_memory.h"

#include <algorithm>
#include <cstring>

#include "emulator/block.h"
#include "emulator/options.h"

// `extern __shared__ uint8_t memory[]` in a kernel declares this, in the kernel's namespace.
namespace sagebwd::cuda::sm80 {
constexpr size_t kSharedMemory = 228 * 1024;
alignas(1024) thread_local uint8_t memory[kSharedMemory];
}  // namespace sagebwd::cuda::sm80
namespace sagebwd::cuda::sm90 {
extern thread_local uint8_t memory[sm80::kSharedMemory]
    __attribute__((alias("_ZN7sagebwd4cuda4sm806memoryE")));
}  // namespace sagebwd::cuda::sm90
namespace sagebwd::cuda {
extern thread_local uint8_t memory[sm80::kSharedMemory]
    __attribute__((alias("_ZN7sagebwd4cuda4sm806memoryE")));
}  // namespace sagebwd::cuda
namespace sagebwd::cuda::sla2::linear {
extern thread_local uint8_t memory[sm80::kSharedMemory]
    __attribute__((alias("_ZN7sagebwd4cuda4sm806memoryE")));
}  // namespace sagebwd::cuda::sla2::linear
namespace sagebwd::cuda::sla2::mix {
extern thread_local uint8_t memory[sm80::kSharedMemory]
    __attribute__((alias("_ZN7sagebwd4cuda4sm806memoryE")));
}  // namespace sagebwd::cuda::sla2::mix

namespace sagebwd::emulator {
namespace {

using cuda::sm80::kSharedMemory;
using cuda::sm80::memory;

constexpr int kFill = 0x7f;       // floats near 3e38
constexpr uint32_t kBase = 1024;  // address of the first byte; kernels may not count on 0

}  // namespace

void fill_shared_memory(int used) {
  if (used > 0) std::memset(memory, kFill, kSharedMemory);
}

void check_shared_memory(int used) {
  if (used > 0 &&
      std::any_of(memory + used, memory + kSharedMemory, [](uint8_t x) { return x != kFill; }))
    fail("writes beyond the shared memory of the launch");
}

void* shared_pointer(uint32_t address, uint32_t alignment) {
  if (address % alignment != 0) fail("a misaligned address in shared memory");
  if (address < kBase || address - kBase >= kSharedMemory) fail("an address outside shared memory");
  return memory + (address - kBase);
}

uint32_t shared_address(const void* pointer) {
  const auto at = static_cast<const uint8_t*>(pointer) - memory;
  if (at < 0 || at >= static_cast<int64_t>(kSharedMemory)) fail("a pointer outside shared memory");
  return kBase + static_cast<uint32_t>(at);
}

void Copy::make() const {
  from != nullptr ? std::memcpy(to, from, bytes) : std::memset(to, 0, bytes);
}

void start_copy(uint32_t to, const void* from, uint32_t bytes, bool real) {
  if (reinterpret_cast<uintptr_t>(from) % bytes != 0) fail("a misaligned source of a copy");
  const Copy copy{shared_pointer(to, bytes), real ? from : nullptr, bytes};
  if (options().late_copies)
    thread->copies.back().push_back(copy);
  else
    copy.make();
}

void close_copies() { thread->copies.emplace_back(); }

void wait_for_copies(size_t pending) {
  auto& groups = thread->copies;
  while (groups.size() > pending + 1) {
    for (const Copy& copy : groups.front()) copy.make();
    groups.erase(groups.begin());
  }
}

}  // namespace sagebwd::emulator
