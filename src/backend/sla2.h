// SPDX-License-Identifier: Apache-2.0
// The interface between backends and dispatch for sparse-linear attention, beside attention itself:
// the linear branch (sagebwd/linear.h), and what stands around the branches (sagebwd/mix.h).
#pragma once

#include <cstddef>
#include <string>

#include "spec/linear.h"
#include "spec/mix.h"

namespace sagebwd::backend {

/// The mix of the branches, and what the router needs. Any call in memory of this kind is served.
struct Mix {
  Device device;
  void (*forward)(const spec::MixProblem&, const MixForwardArgs&);
  /// `parts`: memory for spec::AlphaParts; null where those are the results.
  void (*backward)(const spec::MixProblem&, const MixBackwardArgs&, float* parts);
  void (*sparse_backward)(const spec::MixProblem&, const MixSparseArgs&);
  /// `raw`: memory for the means of keys; null unless the mean of the sequence is subtracted.
  void (*block_means)(const spec::MeansProblem&, const BlockMeansArgs&, float* raw);
  void (*top_k)(const TopKArgs&);
};

struct Sla2 {
  /// That of an implementation of attention: it is pinned together with this.
  const char* name;
  /// Why it cannot serve the linear branch of a problem on this machine; empty when it can.
  std::string (*decline)(const spec::LinearProblem&);
  /// Bytes of workspace, not counting alignment of its start.
  size_t (*workspace)(const spec::LinearProblem&);
  /// `workspace` is aligned to kWorkspaceAlign.
  void (*forward)(const spec::LinearProblem&, const LinearForwardArgs&, void* workspace);
  void (*backward)(const spec::LinearProblem&, const LinearBackwardArgs&, void* workspace);
  const Mix* mix = nullptr;  // null: it has the linear branch alone
};

}  // namespace sagebwd::backend
