// SPDX-License-Identifier: Apache-2.0
// The workspace of a call, which may have any alignment.
#pragma once

#include <cstddef>
#include <cstdint>

#include "base/check.h"
#include "dispatch/choose.h"

namespace sagebwd {

/// What a call asks of its caller where an implementation needs `bytes`.
inline size_t padded_workspace(size_t bytes) {
  return bytes == 0 ? 0 : bytes + dispatch::kWorkspaceAlign - 1;
}

/// The workspace of a call: the caller's, or what the caller's allocator gives. `needed`: padded.
template <typename Args>
void* given_workspace(const Args& a, size_t needed) {
  if (needed == 0) return a.workspace;
  const bool allocates = a.workspace == nullptr && a.allocator.run != nullptr;
  void* const given = allocates ? a.allocator.run(a.allocator.context, needed) : a.workspace;
  SAGE_CHECK(given != nullptr, "workspace: expected " << needed << " bytes, got a null pointer");
  SAGE_CHECK(allocates || a.workspace_bytes >= needed,
             "workspace: expected at least " << needed << " bytes, got " << a.workspace_bytes);
  SAGE_CHECK(reinterpret_cast<uintptr_t>(given) <= UINTPTR_MAX - needed,
             "workspace: expected " << needed << " bytes, got the address " << given);
  return given;
}

/// Its aligned start.
inline void* aligned_workspace(void* given, size_t needed) {
  if (needed == 0) return nullptr;
  constexpr size_t kAlign = dispatch::kWorkspaceAlign;
  const uintptr_t at = reinterpret_cast<uintptr_t>(given);
  return reinterpret_cast<void*>((at + kAlign - 1) / kAlign * kAlign);
}

}  // namespace sagebwd
