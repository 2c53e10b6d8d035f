// SPDX-License-Identifier: Apache-2.0
// The public calls: validate, choose, check the memory, run.
#include "sagebwd/attention.h"

#include <algorithm>
#include <cstdint>
#include <limits>

#include "base/check.h"
#include "dispatch/choose.h"
#include "spec/averages.h"
#include "spec/codes.h"
#include "spec/overlap.h"

namespace sagebwd {
namespace {

using dispatch::kWorkspaceAlign;

/// Whether all results are empty, whatever the size of the batch: such a call needs no memory and
/// no implementation. The largest logit of a sequence without queries is a result too; only on a
/// CPU can it be written from here.
bool no_results(const spec::Problem& p) {
  const bool no_queries = p.b == 0 || p.h == 0 || p.nq == 0;
  if (p.direction == spec::Direction::backward)
    return no_queries && (p.b == 0 || p.hk == 0 || p.nk == 0);
  return no_queries && (p.device == Device::cpu || p.num_sequences() * p.h == 0);
}

void write_no_results(const spec::Problem& p, const ForwardArgs& a) {
  if (a.max_logit != nullptr)
    std::fill_n(a.max_logit, p.num_sequences() * p.h, -std::numeric_limits<float>::infinity());
}
void write_no_results(const spec::Problem&, const auto&) {}

/// What a call is made of, by the kind of its arguments.
template <typename Args>
struct Call;
template <>
struct Call<ForwardArgs> {
  static constexpr auto choose = dispatch::choose;
  static constexpr auto workspace = &dispatch::Implementation::workspace;
  static constexpr auto run = &dispatch::Implementation::forward;
};
template <>
struct Call<BackwardArgs> {
  static constexpr auto choose = dispatch::choose;
  static constexpr auto workspace = &dispatch::Implementation::workspace;
  static constexpr auto run = &dispatch::Implementation::backward;
};
template <>
struct Call<LinearForwardArgs> {
  static constexpr auto choose = dispatch::choose_linear;
  static constexpr auto workspace = &dispatch::Implementation::linear_workspace;
  static constexpr auto run = &dispatch::Implementation::linear_forward;
};
template <>
struct Call<LinearBackwardArgs> {
  static constexpr auto choose = dispatch::choose_linear;
  static constexpr auto workspace = &dispatch::Implementation::linear_workspace;
  static constexpr auto run = &dispatch::Implementation::linear_backward;
};

template <typename Args>
size_t padded_workspace(const dispatch::Implementation& impl, const spec::Problem& p) {
  const size_t bytes = no_results(p) ? 0 : (impl.*Call<Args>::workspace)(p);
  return bytes == 0 ? 0 : bytes + kWorkspaceAlign - 1;
}

/// The aligned start of the caller's workspace.
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
  return reinterpret_cast<void*>((at + kWorkspaceAlign - 1) / kWorkspaceAlign * kWorkspaceAlign);
}

template <typename Args>
size_t workspace_size_of(const Args& a) {
  const spec::Problem p = spec::resolve(a, false);
  return padded_workspace<Args>(Call<Args>::choose(p), p);
}

template <typename Args>
void run(const Args& a) {
  const spec::Problem p = spec::resolve(a, true);
  const dispatch::Implementation& impl = Call<Args>::choose(p);
  const size_t needed = padded_workspace<Args>(impl, p);
  void* workspace = checked_workspace(a, needed);
  spec::check_overlap(p, a, a.workspace, needed);
  if (no_results(p)) return write_no_results(p, a);
  (impl.*Call<Args>::run)(p, a, workspace);
}

}  // namespace

size_t workspace_size(const ForwardArgs& a) { return workspace_size_of(a); }
size_t workspace_size(const BackwardArgs& a) { return workspace_size_of(a); }
size_t workspace_size(const LinearForwardArgs& a) { return workspace_size_of(a); }
size_t workspace_size(const LinearBackwardArgs& a) { return workspace_size_of(a); }

size_t averages_size(const LinearForwardArgs& a) {
  return static_cast<size_t>(spec::AveragesLayout(spec::resolve(a, false)).bytes);
}

size_t codes_size(const ForwardArgs& a) {
  const spec::Problem p = spec::resolve(a, false);
  spec::check_codes_recipe(p.recipe);
  return static_cast<size_t>(spec::codes_layout(p).bytes);
}

void forward(const ForwardArgs& a) { run(a); }
void backward(const BackwardArgs& a) { run(a); }
void linear_forward(const LinearForwardArgs& a) { run(a); }
void linear_backward(const LinearBackwardArgs& a) { run(a); }

std::vector<Candidate> explain(const ForwardArgs& a) {
  return dispatch::explain(spec::resolve(a, false));
}
std::vector<Candidate> explain(const BackwardArgs& a) {
  return dispatch::explain(spec::resolve(a, false));
}

}  // namespace sagebwd
