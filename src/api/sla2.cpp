// SPDX-License-Identifier: Apache-2.0
// The public calls of sparse-linear attention beside attention itself: validate, choose, check the
// memory, run.
#include <cstdint>

#include "api/workspace.h"
#include "base/check.h"
#include "dispatch/choose.h"
#include "sagebwd/linear.h"
#include "sagebwd/mix.h"
#include "spec/averages.h"
#include "spec/overlap.h"

namespace sagebwd {
namespace {

// --- the linear branch ---

/// Whether all results are empty: then a call needs no memory.
bool no_results(const spec::LinearProblem& p) {
  if (p.direction == spec::Direction::backward) return !p.has_queries() && !p.has_keys();
  return !p.has_queries() && !p.has_averages;
}

void run_by(const dispatch::Sla2& impl, const spec::LinearProblem& p, const LinearForwardArgs& a,
            void* workspace) {
  impl.forward(p, a, workspace);
}
void run_by(const dispatch::Sla2& impl, const spec::LinearProblem& p, const LinearBackwardArgs& a,
            void* workspace) {
  impl.backward(p, a, workspace);
}

size_t needed_by(const dispatch::Sla2& impl, const spec::LinearProblem& p) {
  return no_results(p) ? 0 : padded_workspace(impl.workspace(p));
}

template <typename Args>
size_t workspace_size_of(const Args& a) {
  const spec::LinearProblem p = spec::resolve(a, false);
  return needed_by(dispatch::choose(p), p);
}

template <typename Args>
void run(const Args& a) {
  const spec::LinearProblem p = spec::resolve(a, true);
  const dispatch::Sla2& impl = dispatch::choose(p);
  const size_t needed = needed_by(impl, p);
  void* const workspace = given_workspace(a, needed);
  spec::check_overlap(p, a, workspace, needed);
  if (!no_results(p)) run_by(impl, p, a, aligned_workspace(workspace, needed));
}

// --- around the branches ---

size_t needed(const spec::MixProblem& p, const MixBackwardArgs& a) {
  const spec::AlphaParts parts(p, a.alpha);
  if (a.dalpha == nullptr || p.empty() || parts.are_results()) return 0;
  return static_cast<size_t>(parts.count) * sizeof(float);
}
size_t needed(const spec::MeansProblem& p, const BlockMeansArgs& a) {
  return a.mean_free_keys ? static_cast<size_t>(p.k_numbers()) * sizeof(float) : 0;
}

float* floats_of(const Place& a, size_t bytes) {
  if (bytes == 0) return nullptr;
  SAGE_CHECK(a.workspace != nullptr && a.workspace_bytes >= bytes,
             "workspace: expected at least " << bytes << " bytes, got "
                                             << (a.workspace ? a.workspace_bytes : 0));
  SAGE_CHECK(reinterpret_cast<uintptr_t>(a.workspace) % alignof(float) == 0,
             "workspace: expected an address aligned for floats, got " << a.workspace);
  return static_cast<float*>(a.workspace);
}

}  // namespace

size_t workspace_size(const LinearForwardArgs& a) { return workspace_size_of(a); }
size_t workspace_size(const LinearBackwardArgs& a) { return workspace_size_of(a); }

size_t averages_size(const LinearForwardArgs& a) {
  return static_cast<size_t>(spec::AveragesLayout(spec::resolve(a, false)).bytes);
}

std::string refusal(const LinearForwardArgs& a) {
  return dispatch::refusal(spec::resolve(a, false));
}
std::string refusal(const LinearBackwardArgs& a) {
  return dispatch::refusal(spec::resolve(a, false));
}

void linear_forward(const LinearForwardArgs& a) { run(a); }
void linear_backward(const LinearBackwardArgs& a) { run(a); }

size_t workspace_size(const MixBackwardArgs& a) { return needed(spec::resolve(a, false), a); }
size_t workspace_size(const BlockMeansArgs& a) { return needed(spec::resolve(a, false), a); }

void mix_forward(const MixForwardArgs& a) {
  const spec::MixProblem p = spec::resolve(a);
  if (p.empty()) return;
  spec::check_overlap(p, a);
  dispatch::mix_on(a.device).forward(p, a);
}

void mix_backward(const MixBackwardArgs& a) {
  const spec::MixProblem p = spec::resolve(a, true);
  const size_t bytes = needed(p, a);
  float* const parts = floats_of(a, bytes);
  if (p.empty()) return;
  spec::check_overlap(p, a, parts, bytes);
  dispatch::mix_on(a.device).backward(p, a, parts);
}

void mix_sparse_backward(const MixSparseArgs& a) {
  const spec::MixProblem p = spec::resolve(a);
  if (p.empty()) return;
  spec::check_overlap(p, a);
  dispatch::mix_on(a.device).sparse_backward(p, a);
}

void block_means(const BlockMeansArgs& a) {
  const spec::MeansProblem p = spec::resolve(a, true);
  const size_t bytes = needed(p, a);
  float* const raw = floats_of(a, bytes);
  spec::check_overlap(p, a, raw, bytes);
  dispatch::mix_on(a.device).block_means(p, a, raw);
}

void top_k(const TopKArgs& a) {
  spec::check(a);
  if (a.rows == 0) return;
  spec::check_overlap(a);
  dispatch::mix_on(a.device).top_k(a);
}

}  // namespace sagebwd
