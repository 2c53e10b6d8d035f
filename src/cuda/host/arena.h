// SPDX-License-Identifier: Apache-2.0
// Cutting a workspace into pieces.
#pragma once

#include <cstddef>
#include <cstdint>

namespace sagebwd::cuda {

/// Hands out aligned pieces of a workspace. With a null base it only adds up their sizes.
class Arena {
 public:
  explicit Arena(void* base) : base_(static_cast<std::byte*>(base)) {}
  template <typename T>
  T* take(int64_t count) {
    const size_t at = used_;
    used_ += (static_cast<size_t>(count) * sizeof(T) + kAlign - 1) / kAlign * kAlign;
    return base_ == nullptr ? nullptr : reinterpret_cast<T*>(base_ + at);
  }
  size_t used() const { return used_; }

 private:
  static constexpr size_t kAlign = 128;
  std::byte* base_;
  size_t used_ = 0;
};

/// The first aligned address in the caller's workspace, which may be aligned to less.
inline constexpr size_t kDeviceAlign = 128;
inline void* aligned(void* workspace) {
  const uintptr_t at = reinterpret_cast<uintptr_t>(workspace);
  return reinterpret_cast<void*>((at + kDeviceAlign - 1) / kDeviceAlign * kDeviceAlign);
}

}  // namespace sagebwd::cuda
