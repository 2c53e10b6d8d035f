// SPDX-License-Identifier: Apache-2.0
// The caller's workspace, which may have any alignment.
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

/// The aligned start of the caller's workspace. `needed`: padded.
template <typename Args>
void* checked_workspace(const Args& a, size_t needed) {
  if (needed == 0) return nullptr;
  SAGE_CHECK(a.workspace != nullptr,
             "workspace: expected " << needed << " bytes, got a null pointer");
  SAGE_CHECK(a.workspace_bytes >= needed,
             "workspace: expected at least " << needed << " bytes, got " << a.workspace_bytes);
  const uintptr_t at = reinterpret_cast<uintptr_t>(a.workspace);
  SAGE_CHECK(at <= UINTPTR_MAX - needed,
             "workspace: expected " << needed << " bytes, got the address " << a.workspace);
  constexpr size_t kAlign = dispatch::kWorkspaceAlign;
  return reinterpret_cast<void*>((at + kAlign - 1) / kAlign * kAlign);
}

}  // namespace sagebwd
