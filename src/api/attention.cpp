// SPDX-License-Identifier: Apache-2.0
// The public calls: validate, choose, check the workspace, run.
#include "sagebwd/attention.h"

#include <cstdint>

#include "base/check.h"
#include "dispatch/choose.h"

namespace sagebwd {
namespace {

using dispatch::kWorkspaceAlign;

size_t padded_workspace(const dispatch::Implementation& impl, const spec::Problem& p) {
  const size_t bytes = impl.workspace(p);
  return bytes == 0 ? 0 : bytes + kWorkspaceAlign - 1;
}

/// The aligned start of the caller's workspace.
void* checked_workspace(const AttentionArgs& a, size_t needed) {
  if (needed == 0) return nullptr;
  SAGE_CHECK(a.workspace != nullptr,
             "workspace: expected " << needed << " bytes, got a null pointer");
  SAGE_CHECK(a.workspace_bytes >= needed,
             "workspace: expected at least " << needed << " bytes, got " << a.workspace_bytes);
  const uintptr_t at = reinterpret_cast<uintptr_t>(a.workspace);
  return reinterpret_cast<void*>((at + kWorkspaceAlign - 1) / kWorkspaceAlign * kWorkspaceAlign);
}

template <typename Args>
size_t workspace_size_of(const Args& a) {
  const spec::Problem p = spec::resolve(a, false);
  return padded_workspace(dispatch::choose(p), p);
}

}  // namespace

size_t workspace_size(const ForwardArgs& a) { return workspace_size_of(a); }
size_t workspace_size(const BackwardArgs& a) { return workspace_size_of(a); }

void forward(const ForwardArgs& a) {
  const spec::Problem p = spec::resolve(a, true);
  const dispatch::Implementation& impl = dispatch::choose(p);
  void* workspace = checked_workspace(a, padded_workspace(impl, p));
  impl.forward(p, a, workspace);
}

void backward(const BackwardArgs& a) {
  const spec::Problem p = spec::resolve(a, true);
  const dispatch::Implementation& impl = dispatch::choose(p);
  void* workspace = checked_workspace(a, padded_workspace(impl, p));
  impl.backward(p, a, workspace);
}

std::vector<Candidate> explain(const ForwardArgs& a) {
  return dispatch::explain(spec::resolve(a, false));
}
std::vector<Candidate> explain(const BackwardArgs& a) {
  return dispatch::explain(spec::resolve(a, false));
}

}  // namespace sagebwd
