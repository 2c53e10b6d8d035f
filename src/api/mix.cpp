// SPDX-License-Identifier: Apache-2.0
#include "sagebwd/mix.h"

#include <cstdint>

#include "base/check.h"
#include "dispatch/choose.h"
#include "spec/mix.h"
#include "spec/overlap.h"

namespace sagebwd {
namespace {

size_t needed(const spec::MixProblem& p, const MixBackwardArgs& a) {
  const spec::AlphaParts parts(p, a.alpha);
  if (a.dalpha == nullptr || p.empty() || parts.are_results()) return 0;
  return static_cast<size_t>(parts.count) * sizeof(float);
}
size_t needed(const spec::MeansProblem& p, const BlockMeansArgs& a) {
  return a.mean_free_keys ? static_cast<size_t>(p.k_numbers()) * sizeof(float) : 0;
}

float* workspace(const Place& a, size_t bytes) {
  if (bytes == 0) return nullptr;
  SAGE_CHECK(a.workspace != nullptr && a.workspace_bytes >= bytes,
             "workspace: expected at least " << bytes << " bytes, got "
                                             << (a.workspace ? a.workspace_bytes : 0));
  SAGE_CHECK(reinterpret_cast<uintptr_t>(a.workspace) % alignof(float) == 0,
             "workspace: expected an address aligned for floats, got " << a.workspace);
  return static_cast<float*>(a.workspace);
}

}  // namespace

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
  float* const parts = workspace(a, bytes);
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
  float* const raw = workspace(a, bytes);
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
