// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <atomic>
#include <cstdint>

namespace sagebwd::cuda::arch {

inline uint32_t load_acquire(const uint32_t* from) {
  return std::atomic_ref<uint32_t>(*const_cast<uint32_t*>(from)).load(std::memory_order_acquire);
}
inline void add_release(uint32_t* to, uint32_t x) {
  std::atomic_ref<uint32_t>(*to).fetch_add(x, std::memory_order_release);
}

}  // namespace sagebwd::cuda::arch
