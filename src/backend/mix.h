// SPDX-License-Identifier: Apache-2.0
// What a backend has for sagebwd/mix.h.
#pragma once

#include "spec/mix.h"

namespace sagebwd::backend {

struct Mix {
  void (*forward)(const spec::MixProblem&, const MixForwardArgs&);
  /// `parts`: memory for spec::AlphaParts; null where those are the results.
  void (*backward)(const spec::MixProblem&, const MixBackwardArgs&, float* parts);
  void (*sparse_backward)(const spec::MixProblem&, const MixSparseArgs&);
  /// `raw`: memory for the means of keys; null unless the mean of the sequence is subtracted.
  void (*block_means)(const spec::MeansProblem&, const BlockMeansArgs&, float* raw);
  void (*top_k)(const TopKArgs&);
};

}  // namespace sagebwd::backend
